package local

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// An interrupted allocation is completed, each part once and in order; any other error ends it.
func TestAllocatedInPieces(t *testing.T) {
	type call struct{ at, n int64 }
	whole, rest := call{0, 2*allocationStep + 5}, call{2 * allocationStep, 5}
	for name, c := range map[string]struct {
		answers []error // the last one is repeated
		want    []call
		err     error
	}{
		"at once": {[]error{nil}, []call{whole}, nil},
		"full":    {[]error{unix.ENOSPC}, []call{whole}, unix.ENOSPC},
		"interrupted once": {[]error{unix.EINTR, nil},
			[]call{whole, {0, allocationStep}, {allocationStep, allocationStep}, rest}, nil},
		"a piece, too": {[]error{unix.EINTR, nil, unix.EINTR, unix.EINTR, nil},
			[]call{whole, {0, allocationStep}, {allocationStep, allocationStep}, {allocationStep, allocationStep},
				{allocationStep, allocationStep}, rest}, nil},
		"full after interrupted": {[]error{unix.EINTR, nil, unix.ENOSPC},
			[]call{whole, {0, allocationStep}, {allocationStep, allocationStep}}, unix.ENOSPC},
	} {
		t.Run(name, func(t *testing.T) {
			var got []call
			err := allocateInSteps(whole.n, func(at, n int64) error {
				got = append(got, call{at, n})
				return c.answers[min(len(got), len(c.answers))-1]
			})
			if err != c.err || !slices.Equal(got, c.want) {
				t.Errorf("%v after %v, want %v after %v", err, got, c.err, c.want)
			}
		})
	}
}

// Before Linux 6.10, tmpfs gives up an allocation at every signal; the guest has such a kernel.
func TestAllocatedThroughSignals(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256m"); err != nil {
		t.Skipf("needs: the right to mount: %v", err)
	}
	defer func() { must(t, unix.Unmount(dir, 0)) }()
	const size = 2*allocationStep + 5*mib
	interrupted := func(take func(f *os.File) error) (err error) {
		f, err := os.Create(filepath.Join(dir, "f"))
		must(t, err)
		defer f.Close()
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		thread, ended, stopped := unix.Gettid(), make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for range 50_000 {
				must(t, unix.Tgkill(os.Getpid(), thread, unix.SIGURG)) // as the runtime does to preempt a thread
				select {
				case <-ended:
					return
				default:
				}
			}
		}()
		err = take(f)
		close(ended)
		<-stopped
		if err != nil {
			return err
		}
		var st unix.Stat_t
		must(t, unix.Fstat(int(f.Fd()), &st))
		if st.Size != size || st.Blocks*512 < size {
			t.Errorf("the file has %d bytes and blocks of %d, want %d", st.Size, st.Blocks*512, size)
		}
		return nil
	}
	for range 5 {
		if err := interrupted(func(f *os.File) error { return allocateBlocks(f, size) }); err != nil {
			t.Fatalf("%d bytes with signals meanwhile: %v", int64(size), err)
		}
	}
}
