"""Weight formats, one file each: conversion of stored numbers to values."""
