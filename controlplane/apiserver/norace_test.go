//go:build !race

package apiserver

const instrumented = false
