// Package qemuguest boots a Debian kernel under qemu with software emulation (TCG) and runs
// programs in the guest. The guest has a root file system made by this package and no network
// device. Programs get cgroup v2 alone and every capability; the machine that runs the tests may
// have neither.
package qemuguest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/test/qemuguest/plan"
	"keelson.dev/keelson/test/testenv/tscrate"
)

// tscParameter returns the kernel parameter with the frequency of the time stamp counter, or "" if
// it is unknown. The kernel need not calibrate the counter then. On a busy host the calibration was
// at times wrong by a factor of ten.
func tscParameter() string {
	if khz, ok := tscrate.KHz(); ok {
		return fmt.Sprintf(" tsc_early_khz=%d", khz)
	}
	return ""
}

// memory is the guest's memory in MiB. At the start the compressed root archive takes a part of it,
// and the root file system may use half of the rest.
const memory = "1536"

// commandLine is the kernel's command line. A panic ends the virtual machine. Mitigations are off:
// they cost time, and the guest runs nothing that could attack it.
const commandLine = "console=ttyS0 loglevel=4 panic=-1 reboot=t mitigations=off nokaslr tsc=reliable no_timer_check " +
	"unknown_nmi_panic rdinit=/init"

// accelerator emulates both processors in one thread. With one thread each, qemu 7.2 translates
// code while the other processor patches it, and keeps executing a breakpoint that existed for a
// moment only. The kernel patches its code when the first nftables rule is added to a hook, or the
// first cgroup gets a limit. Both processors then hang. Creating and deleting a hundred nftables
// tables during UDP traffic on the loopback reproduces it.
const accelerator = "tcg,thread=single"

// machine is the configuration of a virtual machine.
type machine struct {
	kernel  *kernel
	dir     string            // folder on the host for the root archive, the console log and the monitor's socket
	modules []string          // names of the kernel modules to load
	files   map[string]string // paths on the host by path in the guest
	dirs    []string
	plan    plan.Plan
}

// addTool adds a program of the host, and the shared libraries that it is linked to, to the guest.
// If the host does not have it, addTool takes the program from the packages that were unpacked for
// the guest.
func (m *machine) addTool(name string) error {
	host, err := exec.LookPath(name)
	for _, dir := range []string{"sbin", "usr/sbin", "bin", "usr/bin"} {
		if p := filepath.Join(m.kernel.root, dir, name); err != nil {
			host, err = exec.LookPath(p)
		}
	}
	if err != nil {
		return fmt.Errorf("%s is neither installed on this machine nor unpacked below %s by scripts/setup guest: %w",
			name,
			m.kernel.root, err)
	}
	m.files["/bin/"+name] = host
	ldd := exec.Command("ldd", host)
	ldd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+strings.Join(m.kernel.libraries, ":"))
	out, err := ldd.Output()
	if err != nil {
		return fmt.Errorf("libraries of %s: %w", host, err)
	}
	for _, word := range strings.Fields(string(out)) { // NAME => /PATH (ADDRESS), or /PATH (ADDRESS)
		if filepath.IsAbs(word) {
			m.files[strings.TrimPrefix(word, m.kernel.root)] = word
		}
	}
	return nil
}

// addFolder adds the regular files below the folder host of the host as the folder name of the
// guest. It omits the relative paths in without. A folder in without is skipped with its content.
func (m *machine) addFolder(name, host string, without ...string) error {
	return filepath.WalkDir(host, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(host, p)
		switch {
		case err != nil:
			return err
		case slices.Contains(without, rel):
			if d.IsDir() {
				return filepath.SkipDir
			}
		case d.Type().IsRegular():
			m.files[filepath.Join(name, rel)] = p
		}
		return nil
	})
}

// writeArchive writes the guest's root as a cpio archive and returns its path.
func (m *machine) writeArchive() (file string, err error) {
	file = filepath.Join(m.dir, "root.cpio")
	f, err := os.Create(file)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	a := newArchive(f)
	for _, d := range append(m.dirs, "/root", "/proc", "/sys", "/dev", "/run", "/tmp", "/var", "/etc", "/guest") {
		if err := a.addFolder(d); err != nil {
			return "", err
		}
	}
	modules, err := m.kernel.orderModules(m.modules...)
	if err != nil {
		return "", err
	}
	for _, host := range modules {
		name := "/guest/" + filepath.Base(host)
		m.plan.Modules = append(m.plan.Modules, name)
		if err := a.addFile(name, host); err != nil {
			return "", err
		}
	}
	for name, host := range m.files {
		if err := a.addFile(name, host); err != nil {
			return "", err
		}
	}
	for _, applet := range []string{"sh", "mkdir"} {
		if err := a.addLink("/bin/"+applet, "busybox"); err != nil {
			return "", err
		}
	}
	raw, err := json.Marshal(m.plan)
	if err != nil {
		return "", err
	}
	if err := a.addText(plan.File, string(raw), 0o644); err != nil {
		return "", err
	}
	return file, a.writeTrailer()
}

// runGuest runs the virtual machine until it exits, and calls handle for every report of the guest.
// It returns the kernel's console output. The error is set if the guest exited before its last
// report.
func (m *machine) runGuest(ctx context.Context, qemu string, handle func(plan.Report)) (console []byte, err error) {
	root, err := m.writeArchive()
	if err != nil {
		return nil, fmt.Errorf("write the guest's root archive: %w", err)
	}
	said, monitor := filepath.Join(m.dir, "console"), filepath.Join(m.dir, "monitor")
	cmd := exec.CommandContext(ctx, qemu, "-no-user-config", "-nodefaults", "-display", "none", "-no-reboot",
		"-machine", "pc", "-accel", accelerator, "-cpu", "max,la57=off", "-smp", "2", "-m", memory,
		"-kernel", m.kernel.image, "-initrd", root, "-append", commandLine+tscParameter(),
		"-monitor", "unix:"+monitor+",server=on,wait=off", "-serial", "file:"+said, "-chardev",
		"stdio,id=reports,signal=off", "-serial", "chardev:reports")
	cmd.WaitDelay = 10 * time.Second
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	quiet := time.AfterFunc(silence, func() { dumpRegisters(monitor, filepath.Join(m.dir, "stuck")) })
	done, err := readReports(bufio.NewReader(out), func(r plan.Report) {
		quiet.Reset(silence)
		handle(r)
	})
	quiet.Stop()
	err = errors.Join(err, cmd.Wait(), ctx.Err())
	if stuck, rerr := os.ReadFile(filepath.Join(m.dir, "stuck")); rerr == nil {
		err = errors.Join(err, fmt.Errorf("the guest sent nothing for %s; registers and stacks of its processors:\n%s",
			silence, stuck))
	}
	if err == nil && !done {
		err = errors.New("the guest exited before its last report")
	}
	console, rerr := os.ReadFile(said)
	return console, errors.Join(err, rerr)
}

// silence is the longest time between two reports, after which the guest is considered stuck. A
// test in the guest waits for six minutes at most.
const silence = 8 * time.Minute

// registers are the first registers of those lines of the monitor's "info registers" that
// dumpRegisters keeps. These lines show the instruction pointer and the current data.
var registers = []string{"RAX", "RSI", "R8", "R12", "RIP", "CR0"}

// dumpRegisters writes the registers of a stuck guest's processors to file. Then it sends a
// non-maskable interrupt, on which the guest's kernel prints a stack trace to the console and
// panics.
func dumpRegisters(monitor, file string) {
	conn, err := net.Dial("unix", monitor)
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.WriteString(conn, "info registers -a\ninfo registers -a\nnmi\n"); err != nil {
		return
	}
	var told []string
	for in := bufio.NewScanner(io.LimitReader(conn, 1<<20)); in.Scan(); { // until qemu exits, or until the deadline
		if name, _, _ := strings.Cut(in.Text(), "="); slices.Contains(registers, strings.TrimSpace(name)) ||
			strings.HasPrefix(name, "CPU#") {
			told = append(told, in.Text())
		}
	}
	_ = os.WriteFile(file, []byte(strings.Join(told, "\n")), 0o600)
}

// readReports calls handle for every report until the serial line is closed. done is true if the
// last report was received.
func readReports(in *bufio.Reader, handle func(plan.Report)) (done bool, err error) {
	for dec := json.NewDecoder(in); dec.More(); {
		var r plan.Report
		if err := dec.Decode(&r); err != nil {
			return false, fmt.Errorf("read the guest's report: %w", err)
		}
		done = done || r.Done
		handle(r)
	}
	return done, nil
}
