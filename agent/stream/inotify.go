package stream

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// notifier tells of changes in one folder.
type notifier struct {
	f  *os.File
	ch chan struct{} // capacity 1: something changed
}

// watchFolder begins to watch. close ends it.
func watchFolder(dir string) (*notifier, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watching %s: %w", dir, err)
	}
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_MODIFY|unix.IN_CREATE|unix.IN_MOVED_FROM|unix.IN_MOVED_TO|unix.IN_DELETE|unix.IN_DELETE_SELF|unix.IN_ONLYDIR); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("watching %s: %w", dir, err)
	}
	n := &notifier{f: os.NewFile(uintptr(fd), "inotify"), ch: make(chan struct{}, 1)}
	go n.run()
	return n, nil
}

// run ends when the file is closed, or the folder is gone for good.
func (n *notifier) run() {
	defer close(n.ch)
	buf := make([]byte, 4096)
	for {
		if _, err := n.f.Read(buf); err != nil {
			return
		}
		select {
		case n.ch <- struct{}{}:
		default:
		}
	}
}

func (n *notifier) close() { n.f.Close() }
