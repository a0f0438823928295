// Package shim is the parent of one pod's processes. It holds their standard
// streams and terminals, writes their logs, reaps them and records how they
// ended; agents come and go on its socket.
//
// One thread runs one epoll loop; a second waits for children. There is one shim
// for every pod of a node, so memory is what counts: nothing here imports os, fmt
// or time, buffers are shared, and a stream costs a buffer only while it holds
// half a line.
package shim

import (
	"strconv"
	"syscall"

	"keelson.dev/keelson/agent/oci/wire"
)

// ListenFD is the listening socket that the agent passes to its shim.
const ListenFD = 3

// failure is an error that is only text.
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
	scratch  []byte // every read goes through it
	program  program

	pausePID   int
	pauseEnded bool
	containers []*container
	children   map[int]*child
	early      map[int]early // ended before keelson-oci had said whose they are
	helpers    int           // keelson-oci processes under way
	reaped     chan struct{} // asks the waiting thread for one more child
	waiting    bool          // it has been asked
	quit       bool
}

// child is a process that the shim expects to end.
type child struct {
	ended func(code int, now int64)
}

type early struct {
	code int
	time int64
}

// Run serves on listenFD until it is told to shut down. self is the path of the
// running binary.
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
			// A handler of this round may have closed the descriptor.
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

// mod changes what fd is watched for; 0 leaves only hang-ups.
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

// drop stops watching *fd, closes it and marks it closed.
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

// snapshot says all there is to say to an agent that has just come.
func (l *loop) snapshot() *wire.Snapshot {
	s := &wire.Snapshot{PausePID: int64(l.pausePID), PauseEnded: l.pauseEnded}
	for _, c := range l.containers {
		if c.state != 0 {
			s.Containers = append(s.Containers, wire.Status{Container: c.req.Container, State: c.state, PID: int64(c.pid), Started: c.started, Exit: c.exit})
		}
	}
	return s
}

// watchChildren starts the thread that waits. It only looks (WNOWAIT): children
// are reaped in the loop, so a signal sent from the loop never meets a pid that
// somebody else has by now.
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

// expect makes sure that somebody waits as long as there are children.
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
			return // the next spawn waits again
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

// own registers a process that keelson-oci has left to us; it may have ended already.
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
	l.expect() // it has left us a child, perhaps the first one
}

func describe(what string, err error) string { return what + ": " + err.Error() }

func itoa(n int) string { return strconv.Itoa(n) }
