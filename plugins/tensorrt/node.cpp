#include "node.h"

#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace trt_eagle3 {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

// A serialized node: this, then `num_values` of Value. Both sides are the same library, so raw bytes will do; a library
// whose attributes or layout differ must say so with another version.
struct Header {
  uint32_t magic = 0x50334554;  // "TE3P"
  uint32_t version = 1;
  uint32_t op = 0;
  uint32_t num_values = 0;
  int32_t num_inputs = 0;
  uint32_t unused = 0;
  uint64_t scratch_bytes = 0;
};

// FNV-1a of the op's name, so that no op reads the bytes of another.
uint32_t hash_of(const char* text) {
  uint32_t hash = 2166136261u;
  for (; *text != '\0'; ++text) hash = (hash ^ static_cast<unsigned char>(*text)) * 16777619u;
  return hash;
}

// The number in a field; false if it holds none, or more than one.
bool number_of(const PluginField& field, double* number) {
  if (field.data == nullptr || field.length > 1) return false;
  switch (field.type) {
    case PluginFieldType::kINT32:
      *number = *static_cast<const int32_t*>(field.data);
      return true;
    case PluginFieldType::kFLOAT32:
      *number = *static_cast<const float*>(field.data);
      return true;
    case PluginFieldType::kFLOAT64:
      *number = *static_cast<const double*>(field.data);
      return true;
#if NV_TENSORRT_MAJOR >= 10
    case PluginFieldType::kINT64:
      *number = static_cast<double>(*static_cast<const int64_t*>(field.data));
      return true;
#endif
    default:
      return false;
  }
}

std::string read_field(const Attribute& attribute, const PluginField& field, Value* value) {
  double number = 0.0;
  if (!number_of(field, &number)) return std::string(attribute.name) + ": expected one number";
  if (!std::isfinite(number)) return std::string(attribute.name) + ": expected a finite number";
  value->given = true;
  value->real = static_cast<float>(number);
  if (attribute.is_float) return "";
  if (number != std::floor(number) || number < INT_MIN || number > INT_MAX) {
    return std::string(attribute.name) + ": expected a 32-bit integer, got " + std::to_string(number);
  }
  value->integer = static_cast<int32_t>(number);
  return "";
}

std::string text_of(const Description& op, const Values& values) {
  std::string text;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].given) continue;
    char number[32];
    std::snprintf(number, sizeof number, "%.9g", op.attributes[i].is_float ? values[i].real : values[i].integer);
    text += (text.empty() ? "" : " ") + std::string(op.attributes[i].name) + "=" + number;
  }
  return text;
}

}  // namespace

Node::Node(const Description& op, Values values, int32_t num_inputs, size_t scratch_bytes, bool building)
    : op_(&op),
      values_(std::move(values)),
      num_inputs_(num_inputs),
      scratch_bytes_(scratch_bytes),
      building_(building),
      text_(text_of(op, values_)) {}

std::unique_ptr<Node> Node::from_fields(const Description& op, const nvinfer1::PluginFieldCollection* fields,
                                        bool building) {
  Values values(op.attributes.size());
  std::string reason;
  for (int32_t f = 0; fields != nullptr && f < fields->nbFields && reason.empty(); ++f) {
    const PluginField& field = fields->fields[f];
    for (size_t i = 0; i < values.size() && reason.empty(); ++i) {
      if (field.name != nullptr && std::strcmp(field.name, op.attributes[i].name) == 0) {
        reason = read_field(op.attributes[i], field, &values[i]);
      }
    }
  }
  for (size_t i = 0; i < values.size() && reason.empty(); ++i) {
    if (op.attributes[i].required && !values[i].given) reason = std::string(op.attributes[i].name) + ": missing";
  }
  if (reason.empty()) reason = op.refuse_values(values);
  if (!reason.empty()) {
    log(Severity::kERROR, std::string(op.name) + ": " + reason);
    return nullptr;
  }
  const size_t scratch = building ? op.make_scratch_bytes(values) : 0;
  return std::unique_ptr<Node>(new Node(op, std::move(values), 0, scratch, building));
}

std::unique_ptr<Node> Node::from_bytes(const Description& op, const void* data, size_t size) {
  Header header;
  const Header wanted;
  const auto* bytes = static_cast<const char*>(data);
  std::string reason;
  if (data == nullptr || size < sizeof header) {
    reason = "its record in the engine is truncated";
  } else {
    std::memcpy(&header, bytes, sizeof header);
    if (header.magic != wanted.magic || header.op != hash_of(op.name)) {
      reason = "its record in the engine is not one of this plugin";
    } else if (header.version != wanted.version || header.num_values != op.attributes.size()) {
      reason = "its record in the engine is of another version of the plugins. Build the engine again";
    } else if (size != sizeof header + header.num_values * sizeof(Value)) {
      reason = "its record in the engine has " + std::to_string(size) + " bytes, expected " +
               std::to_string(sizeof header + header.num_values * sizeof(Value));
    }
  }
  Values values(op.attributes.size());
  if (reason.empty()) {
    std::memcpy(values.data(), bytes + sizeof header, values.size() * sizeof(Value));
    for (size_t i = 0; i < values.size() && reason.empty(); ++i) {
      if (op.attributes[i].required && !values[i].given) reason = std::string(op.attributes[i].name) + ": missing";
    }
  }
  if (reason.empty()) reason = op.refuse_values(values);
  if (reason.empty() && header.num_inputs != 0) reason = op.refuse_num_inputs(values, header.num_inputs);
  if (!reason.empty()) {
    log(Severity::kERROR, std::string(op.name) + ": " + reason);
    return nullptr;
  }
  return std::unique_ptr<Node>(new Node(op, std::move(values), header.num_inputs, header.scratch_bytes, false));
}

std::vector<char> Node::serialize() const {
  Header header;
  header.op = hash_of(op_->name);
  header.num_values = static_cast<uint32_t>(values_.size());
  header.num_inputs = num_inputs_;
  header.scratch_bytes = scratch_bytes_;
  std::vector<char> bytes(sizeof header + values_.size() * sizeof(Value), 0);
  std::memcpy(bytes.data(), &header, sizeof header);
  for (size_t i = 0; i < values_.size(); ++i) {
    Value value;
    std::memset(static_cast<void*>(&value), 0, sizeof value);  // padding too: equal nodes are equal bytes
    value.given = values_[i].given;
    value.integer = values_[i].integer;
    value.real = values_[i].real;
    std::memcpy(bytes.data() + sizeof header + i * sizeof value, &value, sizeof value);
  }
  return bytes;
}

bool Node::refuse(const std::string& reason) const {
  log(Severity::kERROR, std::string(op_->name) + ": " + reason);
  return false;
}

bool Node::supports(int32_t position, const std::vector<const PluginTensorDesc*>& tensors, int32_t num_inputs,
                    int32_t num_outputs) const {
  if (const std::string reason = op_->refuse_num_inputs(values_, num_inputs); !reason.empty()) return refuse(reason);
  if (num_outputs != this->num_outputs()) {
    return refuse("expected " + std::to_string(this->num_outputs()) + " outputs, got " + std::to_string(num_outputs));
  }
  if (tensors[position]->format != nvinfer1::TensorFormat::kLINEAR) return false;
  std::vector<DataType> types(position + 1);
  for (int32_t i = 0; i <= position; ++i) types[i] = tensors[i]->type;
  return op_->accepts(values_, position, types.data(), num_inputs);
}

bool Node::output_type(int32_t output, const DataType* inputs, int32_t num_inputs, DataType* type) const {
  if (const std::string reason = op_->refuse_num_inputs(values_, num_inputs); !reason.empty()) return refuse(reason);
  *type = op_->output_type(output, inputs);
  return true;
}

bool Node::output_shape(int32_t output, const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                        nvinfer1::IExprBuilder& builder, nvinfer1::DimsExprs* shape) {
  const std::vector<Shape> shapes(inputs, inputs + num_inputs);
  if (const std::string reason = refuse_inputs(*op_, values_, shapes); !reason.empty()) return refuse(reason);
  if (output < 0 || output >= num_outputs()) return refuse("there is no output " + std::to_string(output));
  *shape = op_->output_shape(values_, output, inputs, builder);
  num_inputs_ = num_inputs;
  return true;
}

std::string Node::refuse_tensors(const std::vector<const PluginTensorDesc*>& tensors, int32_t num_inputs,
                                 int32_t num_outputs) const {
  std::vector<Shape> shapes;
  for (int32_t i = 0; i < num_inputs; ++i) shapes.emplace_back(tensors[i]->dims);
  if (std::string reason = refuse_inputs(*op_, values_, shapes); !reason.empty()) return reason;
  for (int32_t i = 0; i < num_inputs + num_outputs; ++i) {
    if (supports(i, tensors, num_inputs, num_outputs)) continue;
    const Port& port = i < num_inputs ? op_->inputs[i] : op_->outputs[i - num_inputs];
    return std::string(port.name) + ": type " + std::to_string(static_cast<int32_t>(tensors[i]->type)) + " in format " +
           std::to_string(static_cast<int32_t>(tensors[i]->format)) + " is not accepted with " + text_;
  }
  return "";
}

bool Node::configure(const std::vector<const PluginTensorDesc*>& tensors, int32_t num_inputs, int32_t num_outputs) {
  const std::string reason = refuse_tensors(tensors, num_inputs, num_outputs);
  num_inputs_ = reason.empty() ? num_inputs : 0;
  return reason.empty() || refuse(reason);
}

size_t Node::workspace_bytes(const std::vector<Shape>& max_inputs, const std::vector<DataType>& types) const {
  std::string reason = op_->refuse_num_inputs(values_, static_cast<int32_t>(max_inputs.size()));
  for (size_t i = 0; reason.empty() && i < max_inputs.size(); ++i) {
    bool known = max_inputs[i].rank == op_->inputs[i].rank;
    for (int32_t axis = 0; axis < max_inputs[i].rank; ++axis) known = known && max_inputs[i].size[axis] >= 0;
    if (!known) reason = std::string(op_->inputs[i].name) + ": the workspace needs its largest size";
  }
  if (!reason.empty()) return refuse(reason);  // 0 bytes; launch() refuses to do without
  return op_->workspace_bytes(values_, scratch_bytes_, max_inputs, types.data());
}

int32_t Node::enqueue(const PluginTensorDesc* in_desc, const PluginTensorDesc* out_desc, const void* const* in,
                      void* const* out, void* workspace, cudaStream_t stream) const {
  if (num_inputs_ == 0) return !refuse("not configured with tensors that it accepts");
  const Call call = {in_desc, out_desc, in, out, num_inputs_, workspace, scratch_bytes_, building_, stream};
  const std::string reason = op_->launch(values_, call);
  if (reason.empty()) return 0;
  log(Severity::kERROR, reason);
  return 1;
}

FieldNames::FieldNames(const Description& op) {
  for (const Attribute& attribute : op.attributes) {
    const auto type = attribute.is_float ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32;
    fields_.emplace_back(attribute.name, nullptr, type, 1);
  }
  collection_.nbFields = static_cast<int32_t>(fields_.size());
  collection_.fields = fields_.data();
}

}  // namespace trt_eagle3
