// Package shim is the parent process of one pod's processes. It holds their standard streams and
// terminals, writes their logs, reaps them and records how they ended. Agents connect to its socket
// and may be restarted.
//
// One thread runs an epoll loop; a second waits for children. Every pod of a node has a shim, so
// its memory use matters. Therefore the package does not import os, fmt or time, shares buffers,
// and buffers a stream only while a line is incomplete.
package shim

import (
	"strconv"
	"syscall"

	"keelson.dev/keelson/agent/oci/wire"
)

// ListenFD is the descriptor of the listening socket that the agent passes to its shim.
const ListenFD = 3

// failure is an error that consists of text only.
type failure string

func (f failure) Error() string { return string(f) }

// handler is called when its descriptor is ready.
type handler func(events uint32)

type loop struct {
	self     string // path of the shim's own binary, to start the pause helper
	epoll    int
	devNull  int
	handlers map[int]handler
	conns    []*conn
	scratch  []byte // shared read buffer
	program  program

	pausePID   int
	pauseEnded bool
	containers []*container
	children   map[int]*child
	early      map[int]early // ended before keelson-oci had reported their PID
	helpers    int           // running keelson-oci processes
	reaped     chan struct{} // requests the waiting thread to wait for one child
	waiting    bool          // the request was sent
	quit       bool
}

// child is a process; the shim calls ended at its end.
type child struct {
	ended func(code int, now int64)
}

type early struct {
	code int
	time int64
}

// Run serves on listenFD until a shutdown request. self is the path of the running binary.
func Run(listenFD int, self string) error {
	if err := setSubreaper(); err != nil {
		return err
	}
	ep, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	l := &loop{self: self, epoll: ep, devNull: null, handlers: map[int]handler{}, scratch: make([]byte, 32<<10),
		program:  ownProgram(),
		children: map[int]*child{}, early: map[int]early{}, reaped: make(chan struct{})}
	syscall.CloseOnExec(listenFD)
	if err := syscall.SetNonblock(listenFD, true); err != nil {
		return err
	}
	if err := l.add(listenFD, syscall.EPOLLIN, func(uint32) { l.accept(listenFD) }); err != nil {
		return err
	}
	if err := l.watchChildren(); err != nil {
		return err
	}
	return l.serve()
}

func (l *loop) serve() error {
	events := make([]syscall.EpollEvent, 16)
	for !l.quit {
		n, err := l.wait(events)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		for _, e := range events[:n] {
			// An earlier handler of this round may have closed the descriptor.
			if h := l.handlers[int(e.Fd)]; h != nil {
				h(e.Events)
			}
		}
	}
	return nil
}

func (l *loop) add(fd int, events uint32, h handler) error {
	if err := syscall.EpollCtl(l.epoll, syscall.EPOLL_CTL_ADD, fd, &syscall.EpollEvent{Events: events, Fd: int32(fd)}); err != nil {
		return err
	}
	l.handlers[fd] = h
	return nil
}

// mod changes the events for which fd is watched; 0 leaves only hang-ups.
func (l *loop) mod(fd int, events uint32) {
	_ = syscall.EpollCtl(l.epoll, syscall.EPOLL_CTL_MOD, fd, &syscall.EpollEvent{Events: events, Fd: int32(fd)})
}

// forget stops watching fd without closing it.
func (l *loop) forget(fd int) {
	if l.handlers[fd] != nil {
		delete(l.handlers, fd)
		_ = syscall.EpollCtl(l.epoll, syscall.EPOLL_CTL_DEL, fd, nil)
	}
}

// drop stops watching *fd, closes it and sets it to -1.
func (l *loop) drop(fd *int) {
	if *fd < 0 {
		return
	}
	l.forget(*fd)
	syscall.Close(*fd)
	*fd = -1
}

func (l *loop) find(id string) *container {
	for _, c := range l.containers {
		if c.req.Container == id {
			return c
		}
	}
	return nil
}

// snapshot returns the state of pause and all containers, for an agent that has just connected.
func (l *loop) snapshot() *wire.Snapshot {
	s := &wire.Snapshot{PausePID: int64(l.pausePID), PauseEnded: l.pauseEnded}
	for _, c := range l.containers {
		if c.state != 0 {
			s.Containers = append(s.Containers, wire.Status{Container: c.req.Container, State: c.state, PID: int64(c.pid), Started: c.started, Exit: c.exit})
		}
	}
	return s
}

// watchChildren starts the thread that waits for children. It uses WNOWAIT, and only the loop
// reaps. So a signal that the loop sends never reaches a reused PID.
func (l *loop) watchChildren() error {
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		return err
	}
	go func() {
		one := []byte{1}
		for range l.reaped {
			for waitAny() == syscall.EINTR {
			}
			if _, err := syscall.Write(p[1], one); err != nil {
				return
			}
		}
	}()
	return l.add(p[0], syscall.EPOLLIN, func(uint32) {
		_, _ = syscall.Read(p[0], l.scratch[:16])
		l.waiting = false
		l.reap()
	})
}

// expect makes the second thread wait for the next child, unless it already waits.
func (l *loop) expect() {
	if !l.waiting {
		l.waiting = true
		l.reaped <- struct{}{}
	}
}

func (l *loop) reap() {
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err == syscall.ECHILD {
			return // no children: the next spawn waits again
		}
		if err != nil || pid <= 0 {
			l.expect()
			return
		}
		code := ws.ExitStatus()
		if ws.Signaled() {
			code = 128 + int(ws.Signal())
		}
		if c := l.children[pid]; c != nil {
			delete(l.children, pid)
			c.ended(code, now())
		} else if l.helpers > 0 {
			l.early[pid] = early{code, now()}
		}
	}
}

// own registers the handler of a process that keelson-oci has left as the shim's child. If the
// process has already ended, the handler is called at once.
func (l *loop) own(pid int, ended func(code int, now int64)) {
	l.children[pid] = &child{ended}
	if e, ok := l.early[pid]; ok {
		delete(l.early, pid)
		delete(l.children, pid)
		ended(e.code, e.time)
	}
}

// helperDone is called when a keelson-oci process has ended.
func (l *loop) helperDone() {
	if l.helpers--; l.helpers == 0 {
		clear(l.early)
	}
	l.expect() // keelson-oci has left a child, perhaps the first one
}

func describe(what string, err error) string { return what + ": " + err.Error() }

func itoa(n int) string { return strconv.Itoa(n) }
