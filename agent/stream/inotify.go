package stream

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pollEvery is how often a follower looks at its log when the kernel has no inotify instance or watch left.
const pollEvery = time.Second

// watcher watches folders for all followers of logs with one inotify instance. Instances are few (128 for each user by
// default), and containers of the same user take from the same number.
type watcher struct {
	mu      sync.Mutex
	f       *os.File // the instance, made by the first follower and kept; nil before
	folders map[int32]map[*notifier]bool
	open    func() (int, error) // makes the instance; nil: inotify_init1
}

// notifier signals changes in one folder to one follower.
type notifier struct {
	ch   chan struct{} // capacity 1: something changed; closed when the folder no longer exists
	stop chan struct{} // ends polling; nil for a follower with a watch
	w    *watcher
	wd   int32
}

const watchFlags = unix.IN_MODIFY | unix.IN_CREATE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_DELETE | unix.IN_DELETE_SELF |
	unix.IN_ONLYDIR

// watch returns a notifier of a folder, which close ends. Without an inotify instance or watch it polls.
func (w *watcher) watch(dir string) (*notifier, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := &notifier{ch: make(chan struct{}, 1), w: w}
	err := w.start()
	if err == nil {
		var wd int
		if wd, err = unix.InotifyAddWatch(int(w.f.Fd()), dir, watchFlags); err == nil {
			n.wd = int32(wd)
			if w.folders[n.wd] == nil {
				w.folders[n.wd] = map[*notifier]bool{}
			}
			w.folders[n.wd][n] = true
			return n, nil
		}
	}
	if !exhausted(err) {
		return nil, fmt.Errorf("watching %s: %w", dir, err)
	}
	n.stop = make(chan struct{})
	go n.poll(dir)
	return n, nil
}

// exhausted reports whether the kernel or the process has no instance, watch or descriptor left.
func exhausted(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.ENOMEM)
}

// start makes the instance unless there is one. The lock is held.
func (w *watcher) start() error {
	if w.f != nil {
		return nil
	}
	open := w.open
	if open == nil {
		open = func() (int, error) { return unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK) }
	}
	fd, err := open()
	if err != nil {
		return err
	}
	w.f, w.folders = os.NewFile(uintptr(fd), "inotify"), map[int32]map[*notifier]bool{}
	go w.run(w.f)
	return nil
}

// run passes events on for the life of the process.
func (w *watcher) run(f *os.File) {
	buf := make([]byte, 64<<10)
	for {
		n, err := f.Read(buf)
		if err != nil {
			return
		}
		for rest := buf[:n]; len(rest) >= unix.SizeofInotifyEvent; {
			e := (*unix.InotifyEvent)(unsafe.Pointer(&rest[0]))
			w.signal(e.Wd, e.Mask)
			rest = rest[min(len(rest), unix.SizeofInotifyEvent+int(e.Len)):]
		}
	}
}

// signal wakes the followers of a folder, or all of them when events were lost.
func (w *watcher) signal(wd int32, mask uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if mask&unix.IN_Q_OVERFLOW != 0 {
		for _, followers := range w.folders {
			for n := range followers {
				n.wake()
			}
		}
		return
	}
	for n := range w.folders[wd] {
		n.wake()
		if mask&unix.IN_IGNORED != 0 {
			close(n.ch)
		}
	}
	if mask&unix.IN_IGNORED != 0 { // the folder is gone, and the kernel has removed the watch
		delete(w.folders, wd)
	}
}

func (n *notifier) wake() {
	select {
	case n.ch <- struct{}{}:
	default:
	}
}

// poll wakes the follower from time to time until it stops or the folder no longer exists.
func (n *notifier) poll(dir string) {
	t := time.NewTicker(pollEvery)
	defer t.Stop()
	for {
		select {
		case <-n.stop:
			return
		case <-t.C:
		}
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			close(n.ch)
			return
		}
		n.wake()
	}
}

// close ends the notifier. The last follower of a folder removes its watch.
func (n *notifier) close() {
	if n.stop != nil {
		close(n.stop)
		return
	}
	n.w.mu.Lock()
	defer n.w.mu.Unlock()
	followers := n.w.folders[n.wd]
	if !followers[n] {
		return // the folder no longer exists
	}
	delete(followers, n)
	if len(followers) == 0 {
		delete(n.w.folders, n.wd)
		_, _ = unix.InotifyRmWatch(int(n.w.f.Fd()), uint32(n.wd))
	}
}
