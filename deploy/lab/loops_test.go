package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/wait"
)

// hold has a loop device show a new file, as a driver does for a block volume: until somebody takes it away.
func hold(t *testing.T, file string) fileID {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var st syscall.Stat_t
	if err := syscall.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("this machine has no loop devices for us: %v", err)
	}
	defer control.Close()
	for range 64 { // others take devices as well, between the two calls
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			t.Skipf("this machine has no loop devices for us: %v", err)
		}
		path := fmt.Sprintf("/dev/loop%d", n)
		dev, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Skipf("this machine has no loop devices for us: %v", err)
		}
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &unix.LoopConfig{Fd: uint32(f.Fd())})
		dev.Close()
		if err == nil {
			key := fileID{st.Dev, st.Ino}
			t.Cleanup(func() {
				if p := loopDevices()[key]; p != "" {
					_ = detachLoopDevice(p)
				}
			})
			return key
		}
		if !errors.Is(err, unix.EBUSY) {
			t.Fatalf("%s: %v", path, err)
		}
	}
	t.Fatal("no loop device stays free long enough")
	return fileID{}
}

// Loop devices of block volumes go with the lab whose they are, and no others.
func TestLoopDevicesGoWithTheLab(t *testing.T) {
	dir := t.TempDir()
	ours, theirs := hold(t, filepath.Join(dir, "lab", "w1", "volume")),
		hold(t, filepath.Join(dir, "lab2", "w1", "volume"))
	if have := loopDevices(); have[ours] == "" || have[theirs] == "" {
		t.Fatalf("not shown: %v and %v of %v", ours, theirs, have)
	}
	for range 2 {
		if err := detachLoopDevices(filepath.Join(dir, "lab")); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := wait.For(ctx, 10*time.Millisecond, func() error { // who looks at all devices has it open for a moment
		if path := loopDevices()[ours]; path != "" {
			return fmt.Errorf("%s is still there", path)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	if loopDevices()[theirs] == "" {
		t.Error("the other lab's is gone")
	}
	if err := detachLoopDevices(filepath.Join(dir, "none")); err != nil {
		t.Errorf("of a lab that is not there: %v", err)
	}
}
