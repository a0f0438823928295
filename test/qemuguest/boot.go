// Package qemuguest boots a Debian kernel of its own under qemu, in software, with a root of its own making and no network
// device, and runs programs in it: on cgroup v2 alone and with every capability, which the machine that runs the tests
// may have neither of.
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

// knownTicks is what the kernel need not find out then: on a busy host its seconds were a tenth of one, at times.
func knownTicks() string {
	if khz, ok := tscrate.KHz(); ok {
		return fmt.Sprintf(" tsc_early_khz=%d", khz)
	}
	return ""
}

// memory of the guest, in MiB: its root takes half of what the packed one, which lies in memory too, leaves at the start.
const memory = "1536"

// commandLine of the kernel. A panic ends the machine. What defends against other guests costs time here and defends
// nobody.
const commandLine = "console=ttyS0 loglevel=4 panic=-1 reboot=t mitigations=off nokaslr tsc=reliable no_timer_check unknown_nmi_panic rdinit=/init"

// accelerator has one thread for both processors. With one each qemu 7.2 translates code while the
// other processor patches it, and goes on with the breakpoint that was there for a moment: the kernel patches its own
// whenever the first rule comes to a hook, or the first cgroup has a limit, and both processors then hang. (A hundred tables of
// nftables that come and go beside datagrams over the loopback were enough.)
const accelerator = "tcg,thread=single"

// machine is what is booted.
type machine struct {
	kernel  *kernel
	dir     string            // for its files
	modules []string          // by name
	files   map[string]string // in the guest, and on the host
	dirs    []string
	plan    plan.Plan
}

// addTool adds a program of the host, or of packages that were unpacked for the guest, with the libraries that it is linked to.
func (m *machine) addTool(name string) error {
	host, err := exec.LookPath(name)
	for _, dir := range []string{"sbin", "usr/sbin", "bin", "usr/bin"} {
		if p := filepath.Join(m.kernel.root, dir, name); err != nil {
			host, err = exec.LookPath(p)
		}
	}
	if err != nil {
		return fmt.Errorf("%s is on this machine no more than below %s, where scripts/setup guest puts it: %w", name, m.kernel.root, err)
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

// addFolder adds what is below a folder of the host, but for some of its folders and files.
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

// pack writes the guest's root and returns its path.
func (m *machine) pack() (file string, err error) {
	file = filepath.Join(m.dir, "root.cpio")
	f, err := os.Create(file)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	a := newArchive(f)
	for _, d := range append(m.dirs, "/root", "/proc", "/sys", "/dev", "/run", "/tmp", "/var", "/etc", "/guest") {
		if err := a.dir(d); err != nil {
			return "", err
		}
	}
	modules, err := m.kernel.order(m.modules...)
	if err != nil {
		return "", err
	}
	for _, host := range modules {
		name := "/guest/" + filepath.Base(host)
		m.plan.Modules = append(m.plan.Modules, name)
		if err := a.file(name, host); err != nil {
			return "", err
		}
	}
	for name, host := range m.files {
		if err := a.file(name, host); err != nil {
			return "", err
		}
	}
	for _, applet := range []string{"sh", "mkdir"} {
		if err := a.link("/bin/"+applet, "busybox"); err != nil {
			return "", err
		}
	}
	raw, err := json.Marshal(m.plan)
	if err != nil {
		return "", err
	}
	if err := a.text(plan.File, string(raw), 0o644); err != nil {
		return "", err
	}
	return file, a.close()
}

// boot runs the machine to its end and hands over every report. What the kernel said comes back as console.
func (m *machine) boot(ctx context.Context, qemu string, each func(plan.Report)) (console []byte, err error) {
	root, err := m.pack()
	if err != nil {
		return nil, fmt.Errorf("make the guest's root: %w", err)
	}
	said, monitor := filepath.Join(m.dir, "console"), filepath.Join(m.dir, "monitor")
	cmd := exec.CommandContext(ctx, qemu, "-no-user-config", "-nodefaults", "-display", "none", "-no-reboot",
		"-machine", "pc", "-accel", accelerator, "-cpu", "max,la57=off", "-smp", "2", "-m", memory,
		"-kernel", m.kernel.image, "-initrd", root, "-append", commandLine+knownTicks(),
		"-monitor", "unix:"+monitor+",server=on,wait=off", "-serial", "file:"+said, "-chardev", "stdio,id=reports,signal=off", "-serial", "chardev:reports")
	cmd.WaitDelay = 10 * time.Second
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	quiet := time.AfterFunc(silence, func() { ask(monitor, filepath.Join(m.dir, "stuck")) })
	done, err := read(bufio.NewReader(out), func(r plan.Report) {
		quiet.Reset(silence)
		each(r)
	})
	quiet.Stop()
	err = errors.Join(err, cmd.Wait(), ctx.Err())
	if stuck, rerr := os.ReadFile(filepath.Join(m.dir, "stuck")); rerr == nil {
		err = errors.Join(err, fmt.Errorf("the guest told nothing for %s, and was asked where its processors are:\n%s", silence, stuck))
	}
	if err == nil && !done {
		err = errors.New("the guest ended before its last report")
	}
	console, rerr := os.ReadFile(said)
	return console, errors.Join(err, rerr)
}

// silence is how long a guest may tell nothing: a test in it waits for six minutes at most.
const silence = 8 * time.Minute

// registers begin the lines of the monitor's answer that tell where a processor is and what it works on.
var registers = []string{"RAX", "RSI", "R8", "R12", "RIP", "CR0"}

// ask notes where the processors of a guest are that tells nothing any more, and interrupts them: its kernel then says on
// the console what they were doing, and ends.
func ask(monitor, file string) {
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
	for in := bufio.NewScanner(io.LimitReader(conn, 1<<20)); in.Scan(); { // until qemu ends, or the deadline
		if name, _, _ := strings.Cut(in.Text(), "="); slices.Contains(registers, strings.TrimSpace(name)) || strings.HasPrefix(name, "CPU#") {
			told = append(told, in.Text())
		}
	}
	_ = os.WriteFile(file, []byte(strings.Join(told, "\n")), 0o600)
}

// read hands over reports until the line ends; done says that the last one was there.
func read(in *bufio.Reader, each func(plan.Report)) (done bool, err error) {
	for dec := json.NewDecoder(in); dec.More(); {
		var r plan.Report
		if err := dec.Decode(&r); err != nil {
			return false, fmt.Errorf("read the guest's report: %w", err)
		}
		done = done || r.Done
		each(r)
	}
	return done, nil
}
