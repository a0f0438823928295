package shim

const sysSetns = 268
