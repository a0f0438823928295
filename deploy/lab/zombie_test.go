package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/wait"
)

const firstThreadEnds = "KEELSON_TEST_FIRST_THREAD_ENDS"

// A process of the test begins with its first thread, which nobody else gets then.
func init() {
	if os.Getenv(firstThreadEnds) != "" {
		runtime.LockOSThread()
		go func() { select {} }()
		unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
	}
}

// A process whose first thread has ended while others have not yet is not gone: it still has its files and locks.
func TestFirstThreadEnds(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), firstThreadEnds+"=1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := wait.For(ctx, time.Millisecond, func() error {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err == nil && !bytes.Contains(raw, []byte("State:\tZ")) {
			err = errors.New("its first thread has not ended")
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	if isZombie(pid) {
		t.Error("it is called ended while other threads of it run")
	}
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	if err := wait.For(ctx, time.Millisecond, func() error {
		if !isZombie(pid) {
			return errors.New("it is there")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
}
