package remote

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/csi/privatemounts"
	"keelson.dev/keelson/internal/virtual"
)

func TestMain(m *testing.M) {
	if !Main() {
		privatemounts.Main(m)
	}
}

func TestMountAndUnmount(t *testing.T) {
	privatemounts.SkipUnlessPrivate(t)
	dir := t.TempDir()
	m := Mount{Source: "tmpfs", Target: dir, Type: "tmpfs"}
	if err := m.Do(t.Context()); err != nil {
		t.Fatal(err)
	}
	if is, err := Mounted(dir); !is || err != nil {
		t.Errorf("mounted: %t, %v", is, err)
	}
	for range 2 {
		if err := Unmount(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
	}
	if is, err := Mounted(dir); is || err != nil {
		t.Errorf("mounted: %t, %v", is, err)
	}
	m.Type = "nothing"
	if err := m.Do(t.Context()); !errors.Is(err, unix.ENODEV) {
		t.Errorf("an unknown file system: %v", err)
	}
}

// The kernel's timeout starts when the child process has started, even if a busy machine needs long
// to start it. The start itself has a limit, too.
func TestStartingIsNoTimeOfTheKernels(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		alive := func(ctx context.Context, after time.Duration, want bool) {
			t.Helper()
			time.Sleep(after)
			virtual.Wait()
			if (ctx.Err() == nil) != want || !want && !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
				t.Errorf("%s later: %v, %v", after, ctx.Err(), context.Cause(ctx))
			}
		}
		slow, begun, done := withPatience(t.Context())
		defer done()
		alive(slow, startTimeout-time.Second, true)
		begun()
		alive(slow, kernelTimeout-time.Second, true)
		alive(slow, 2*time.Second, false)
		never, _, done := withPatience(t.Context())
		defer done()
		alive(never, startTimeout+time.Second, false)
	})
	// The start is reported before the kernel has completed the call: this pipe is never read.
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	if err := runNotifying(ctx, request{Mount: Mount{Target: pipe}, Text: "x"}, cancel); !errors.Is(err,
		context.Canceled) {
		t.Errorf("a process that waits in the kernel: %v", err)
	}
}

// A blocked call is abandoned when the context ends, and leaves no mount. A FUSE file system
// without a daemon blocks like an unreachable server.
func TestHangsNoLonger(t *testing.T) {
	privatemounts.SkipUnlessPrivate(t)
	fuse, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("needs: /dev/fuse: %v", err)
	}
	defer unix.Close(fuse)
	dir := t.TempDir()
	if err := unix.Mount("nobody", dir, "fuse", 0,
		fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	target := t.TempDir()
	err = Mount{Source: filepath.Join(dir, "x"), Target: target, Flags: unix.MS_BIND}.Do(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrStuck) {
		t.Errorf("a mount that hangs: %v", err)
	}
	if _, left := stuckTargets.Load(target); left {
		t.Error("its process has not ended")
	}
	if err := Unmount(context.Background(), dir); err != nil {
		t.Error(err)
	}
}
