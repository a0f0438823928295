// Command keelson-shim is the parent of one pod's processes. The agent starts it without flags,
// with its listening socket as file descriptor 3. With the argument "pause" it is the helper
// process that becomes the pod's pause process.
//
// It imports neither os nor fmt to save memory, because every pod has its own shim.
package main

import (
	"syscall"

	"keelson.dev/keelson/agent/oci/shim"
)

func main() {
	args := arguments()
	if len(args) > 1 && args[1] == "pause" {
		err := shim.BecomePause(args[2:])
		_, _ = syscall.Write(3, []byte(err.Error()))
		syscall.Exit(1)
	}
	if err := shim.Run(shim.ListenFD, "/proc/self/exe"); err != nil {
		_, _ = syscall.Write(2, []byte("keelson-shim: "+err.Error()+"\n"))
		syscall.Exit(1)
	}
}

// arguments returns os.Args without importing package os.
func arguments() []string {
	fd, err := syscall.Open("/proc/self/cmdline", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer syscall.Close(fd)
	var all []byte
	buf := make([]byte, 4096)
	for {
		n, err := syscall.Read(fd, buf)
		if n <= 0 || err != nil {
			break
		}
		all = append(all, buf[:n]...)
	}
	var args []string
	start := 0
	for i, c := range all {
		if c == 0 {
			args = append(args, string(all[start:i]))
			start = i + 1
		}
	}
	return args
}
