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

	"keelson.dev/keelson/internal/wakeup"
)

// pollInterval is how often a follower reads its log if no inotify instance or watch is available.
const pollInterval = time.Second

// folderWatcher watches folders for all followers of logs with one inotify instance. Instances are
// limited per user (128 by default), and containers of the same user share the limit.
type folderWatcher struct {
	mu      sync.Mutex
	f       *os.File // the inotify instance, created by the first follower; nil before
	folders map[int32]map[*notifier]bool
	open    func() (int, error) // creates the inotify instance; nil: inotify_init1
}

// notifier signals to one follower of a log that the log's folder has changed.
type notifier struct {
	ch   wakeup.Signal // sent on a change; closed when the folder no longer exists
	stop chan struct{} // stops polling; nil for a follower with a watch
	w    *folderWatcher
	wd   int32
}

const watchFlags = unix.IN_MODIFY | unix.IN_CREATE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_DELETE |
	unix.IN_DELETE_SELF |
	unix.IN_ONLYDIR

// newNotifier returns a notifier for the folder dir, which closeNotifier releases. If no inotify
// instance or watch is available, the notifier polls.
func (w *folderWatcher) newNotifier(dir string) (*notifier, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := &notifier{ch: wakeup.New(), w: w}
	err := w.ensureInstance()
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
	if !isExhausted(err) {
		return nil, fmt.Errorf("watching %s: %w", dir, err)
	}
	n.stop = make(chan struct{})
	go n.pollFolder(dir)
	return n, nil
}

// isExhausted reports whether err means that no inotify instance, watch or file descriptor is
// available.
func isExhausted(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOSPC) ||
		errors.Is(err, unix.ENOMEM)
}

// ensureInstance creates the inotify instance and starts to read its events, unless it exists. The
// caller holds the lock.
func (w *folderWatcher) ensureInstance() error {
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
	go w.readEvents(w.f)
	return nil
}

// readEvents reads inotify events from f and wakes the followers of the changed folders, until the
// process exits.
func (w *folderWatcher) readEvents(f *os.File) {
	buf := make([]byte, 64<<10)
	for {
		n, err := f.Read(buf)
		if err != nil {
			return
		}
		for rest := buf[:n]; len(rest) >= unix.SizeofInotifyEvent; {
			e := (*unix.InotifyEvent)(unsafe.Pointer(&rest[0]))
			w.wakeFollowers(e.Wd, e.Mask)
			rest = rest[min(len(rest), unix.SizeofInotifyEvent+int(e.Len)):]
		}
	}
}

// wakeFollowers wakes the followers of the folder with the watch wd. If the event mask reports lost
// events, it wakes all followers.
func (w *folderWatcher) wakeFollowers(wd int32, mask uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if mask&unix.IN_Q_OVERFLOW != 0 {
		for _, followers := range w.folders {
			for n := range followers {
				n.signalChange()
			}
		}
		return
	}
	for n := range w.folders[wd] {
		n.signalChange()
		if mask&unix.IN_IGNORED != 0 {
			close(n.ch)
		}
	}
	if mask&unix.IN_IGNORED != 0 { // the folder no longer exists, and the kernel has removed the watch
		delete(w.folders, wd)
	}
}

func (n *notifier) signalChange() {
	n.ch.Send()
}

// pollFolder signals a change at intervals, until the notifier is closed or the folder dir no
// longer exists.
func (n *notifier) pollFolder(dir string) {
	t := time.NewTicker(pollInterval)
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
		n.signalChange()
	}
}

// closeNotifier releases the notifier. For the last follower of a folder, it also removes the
// inotify watch.
func (n *notifier) closeNotifier() {
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
