//go:build linux

// Command keelson-oci creates one container, or executes one process, and exits:
//
//	keelson-oci create|exec REQUEST-FILE [tty]
//
// A shim starts it with the container's streams as file descriptors 3 to 5 and, with "tty", the
// socket that receives the terminal as descriptor 6. It prints the PID and a line of JSON, or 0 and
// the error, to standard output. libcontainer starts it again, as "init", inside the container.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime"

	"github.com/sirupsen/logrus"

	"keelson.dev/keelson/agent/oci/bundle"
	"keelson.dev/keelson/agent/oci/container"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "init" {
		container.Init()
	}
	runtime.LockOSThread()
	logrus.SetLevel(logrus.ErrorLevel)
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: keelson-oci create|exec REQUEST-FILE [tty] (started by keelson-shim)")
		os.Exit(2)
	}
	pid, answer, err := run(os.Args[1], os.Args[2], len(os.Args) > 3)
	if err != nil {
		fmt.Printf("0\n%v", err)
		os.Exit(1)
	}
	out, err := json.Marshal(answer)
	if err != nil {
		fmt.Printf("0\n%v", err)
		os.Exit(1)
	}
	fmt.Printf("%d\n%s", pid, out)
}

func run(verb, path string, tty bool) (int, bundle.ResolvedUser, error) {
	s := container.Streams{Stdin: os.NewFile(3, "stdin"), Stdout: os.NewFile(4, "stdout"),
		Stderr: os.NewFile(5, "stderr")}
	if tty {
		s.Console = os.NewFile(6, "console")
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, bundle.ResolvedUser{}, err
	}
	switch verb {
	case "create":
		var r bundle.Create
		if err := json.Unmarshal(data, &r); err != nil {
			return 0, bundle.ResolvedUser{}, fmt.Errorf("read request %s: %w", path, err)
		}
		return container.Create(&r, s)
	case "exec":
		var r bundle.Exec
		if err := json.Unmarshal(data, &r); err != nil {
			return 0, bundle.ResolvedUser{}, fmt.Errorf("read request %s: %w", path, err)
		}
		pid, err := container.Exec(&r, s)
		return pid, bundle.ResolvedUser{}, err
	}
	return 0, bundle.ResolvedUser{}, fmt.Errorf("unknown verb %q", verb)
}
