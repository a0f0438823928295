//go:build linux

// Command init is the first process of the guest. It prepares a bare kernel so that a daemon finds
// the same environment as under systemd: cgroup v2 alone, with no controller delegated. It runs the
// programs of its plan and reports their output.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/test/qemuguest/plan"
)

func main() {
	g := &guest{began: time.Now()}
	if err := g.runPlan(); err != nil {
		g.sendReport(plan.Report{Fault: err.Error()})
		fmt.Fprintln(os.Stderr, "guest:", err) // in case the serial line has failed
	}
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART) // with qemu's -no-reboot this ends the virtual machine
}

type guest struct {
	began time.Time
	mu    sync.Mutex
	line  *json.Encoder
}

func (g *guest) sendReport(r plan.Report) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.line != nil {
		r.Clock = time.Since(g.began).Seconds()
		_ = g.line.Encode(r)
	}
}

func (g *guest) runPlan() error {
	if err := bindRoot(); err != nil {
		return err
	}
	if err := mountAll(); err != nil {
		return err
	}
	out, err := openSerial("/dev/ttyS1")
	if err != nil {
		return err
	}
	g.line = json.NewEncoder(out)
	raw, err := os.ReadFile(plan.File)
	if err != nil {
		return err
	}
	var p plan.Plan
	if err := json.Unmarshal(raw, &p); err != nil {
		return fmt.Errorf("read %s: %w", plan.File, err)
	}
	for _, m := range p.Modules {
		if err := loadModule(m); err != nil {
			return err
		}
	}
	if err := enableLoopback(); err != nil {
		return err
	}
	for _, prog := range p.Programs {
		code, err := g.runProgram(prog)
		if err != nil {
			return fmt.Errorf("run %s: %w", prog.Name, err)
		}
		g.sendReport(plan.Report{Program: prog.Name, Exit: &code})
	}
	g.sendReport(plan.Report{Done: true})
	return nil
}

// bindRoot moves a bind mount of the root on top of the kernel's initial root file system.
// Containers change their root with pivot_root, which the kernel refuses on the initial one.
func bindRoot() error {
	if err := unix.Mount("/", "/root", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind the root: %w", err)
	}
	if err := unix.Chdir("/root"); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	return unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "") // shared propagation, as under systemd
}

func mountAll() error {
	for _, m := range []struct{ kind, at, options string }{
		{"proc", "/proc", ""}, {"sysfs", "/sys", ""}, {"devtmpfs", "/dev", ""}, {"devpts", "/dev/pts",
			"mode=620,ptmxmode=666"},
		{"tmpfs", "/dev/shm", ""}, {"mqueue", "/dev/mqueue", ""}, {"tmpfs", "/run", ""}, {"tmpfs", "/tmp", "mode=1777"},
		{"tmpfs", "/var", ""}, {"cgroup2", "/sys/fs/cgroup", ""}, {"securityfs", "/sys/kernel/security", ""}, {"bpf",
			"/sys/fs/bpf", ""},
	} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.at, m.kind, unix.MS_NOSUID, m.options); err != nil {
			return fmt.Errorf("mount %s at %s: %w", m.kind, m.at, err)
		}
	}
	return nil
}

// openSerial opens a serial line and sets it to raw mode.
func openSerial(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	mode, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("read the mode of %s: %w", path, err)
	}
	mode.Oflag &^= unix.OPOST
	mode.Lflag &^= unix.ECHO | unix.ICANON | unix.ISIG
	if err := unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, mode); err != nil {
		return nil, fmt.Errorf("set the mode of %s: %w", path, err)
	}
	return f, nil
}

func loadModule(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && err != unix.EEXIST {
		return fmt.Errorf("load %s: %w", filepath.Base(file), err)
	}
	return nil
}

func enableLoopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// runProgram runs a program in its own cgroup, forwards its output and returns its exit code. It
// kills the program after p.Seconds. Processes that the program leaves in its cgroup are killed. As
// process 1, init also reaps orphans.
func (g *guest) runProgram(p plan.Program) (code int, err error) {
	slice := filepath.Join("/sys/fs/cgroup/system.slice", p.Name+".service")
	if err := os.MkdirAll(slice, 0o755); err != nil {
		return 0, err
	}
	group, err := os.Open(slice)
	if err != nil {
		return 0, err
	}
	defer group.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	pid, err := syscall.ForkExec(p.Args[0], p.Args, &syscall.ProcAttr{
		Dir: "/", Env: append([]string{"PATH=/bin:/sbin", "HOME=/", "TMPDIR=/tmp"}, p.Env...),
		Files: []uintptr{null.Fd(), w.Fd(), w.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: int(group.Fd())},
	})
	w.Close()
	if err != nil {
		return 0, err
	}
	said := make(chan struct{})
	go func() { g.forwardOutput(p.Name, r); close(said) }()
	late := time.AfterFunc(time.Duration(p.Seconds)*time.Second, func() {
		g.sendReport(plan.Report{Program: p.Name, Line: fmt.Sprintf("killed after %d s", p.Seconds)})
		_ = unix.Kill(pid, unix.SIGKILL)
	})
	code, err = reapUntil(pid)
	late.Stop()
	// Processes that the program left behind may hold the pipe open.
	_ = os.WriteFile(filepath.Join(slice, "cgroup.kill"), []byte("1"), 0)
	_ = r.SetReadDeadline(time.Now().Add(2 * time.Second))
	<-said
	return code, err
}

// reapUntil waits for the child process pid and returns its exit code. It reaps all other children
// that exit meanwhile.
func reapUntil(pid int) (code int, err error) {
	for {
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return 0, fmt.Errorf("wait: %w", err)
		case got == pid && ws.Signaled():
			return 128 + int(ws.Signal()), nil
		case got == pid:
			return ws.ExitStatus(), nil
		}
	}
}

const longest = 4 << 10 // bytes of a reported line; longer lines are split

func (g *guest) forwardOutput(name string, r *os.File) {
	defer r.Close()
	in := bufio.NewReaderSize(r, longest)
	for {
		line, err := in.ReadSlice('\n')
		if len(line) > 0 {
			g.sendReport(plan.Report{Program: name,
				Line: strings.ToValidUTF8(strings.TrimSuffix(string(line), "\n"), "?")})
		}
		if err != nil && err != bufio.ErrBufferFull {
			if err != io.EOF && !os.IsTimeout(err) {
				g.sendReport(plan.Report{Fault: fmt.Sprintf("read the output of %s: %v", name, err)})
			}
			return
		}
	}
}
