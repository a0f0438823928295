package lab

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/settings"
	"keelson.dev/keelson/internal/wait"
)

// binds are the folders that every host has for itself: path on the host → folder below its state.
var binds = [][2]string{
	{"/var/lib/keelson", "lib"},
	{"/var/lib/kubelet", "kubelet"},
	{"/var/log/pods", "pods"},
	{"/var/log/containers", "loglinks"},
	{"/etc/cni/net.d", "cni"},
	{"/etc/keelson", "etc"},
}

// powerOn makes the host's namespaces and folders, all empty of processes. What
// stands below stateDir survives a power cut; /run does not.
func (l *Lab) powerOn(h Host) error {
	for _, b := range binds {
		for _, dir := range []string{b[0], filepath.Join(h.stateDir(), b[1])} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return fmt.Errorf("folders of host %s: %w", h.Name, err)
			}
		}
	}
	if err := os.MkdirAll("/opt/cni/bin", 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(h.runDir(), 0o755); err != nil {
		return err
	}
	if err := h.makeCgroups(); err != nil {
		return err
	}
	if err := pinFolder(); err != nil {
		return err
	}
	for _, pin := range []string{h.MountNS(), h.UTSNS()} {
		if err := os.WriteFile(pin, nil, 0o600); err != nil {
			return err
		}
	}
	var script strings.Builder
	// Pins of other hosts, of other labs too, must not live on in this one's copy of the mount table:
	// their namespaces would outlive them.
	script.WriteString("umount -lR /run/netns /run/keelson-lab*/ns 2>/dev/null\n")
	script.WriteString("set -e\nmount -t tmpfs -o mode=755,size=256m keelson-lab /run\nmkdir -p /run/lock /run/netns\n")
	for _, b := range binds {
		fmt.Fprintf(&script, "mount --bind %s %s\n", filepath.Join(h.stateDir(), b[1]), b[0])
	}
	if l.Config.ControlPlaneFiles != "" && h.Role == RoleControlPlane {
		script.WriteString("mount --bind \"$1\" /etc/keelson\n")
	}
	if l.Config.CNIBinDir != "" && h.Role == RoleWorker {
		fmt.Fprintf(&script, "mount --bind %s /opt/cni/bin\n", l.Config.CNIBinDir)
	}
	fmt.Fprintf(&script, "hostname %s\n", h.Name)
	return h.makeNamespaces(script.String(), l.Config.ControlPlaneFiles)
}

// makeNamespaces makes the host's namespaces, pins them and runs a script in them.
func (h Host) makeNamespaces(script, files string) error {
	args := []string{"nsenter", "--net=" + h.NetNS(), "unshare", "--mount=" + h.MountNS(), "--uts=" + h.UTSNS(),
		"--propagation", "private", "sh", "-c", script, "sh", files}
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	// A mount namespace cannot be pinned in one with a higher number, and some kernels (6.18) have each processor give numbers of
	// its own. In a container's mount namespace it then takes the processor that made that.
	for cpu := range runtime.NumCPU() {
		if err == nil {
			break
		}
		if pinned, lookErr := isMountPoint(h.MountNS()); pinned || lookErr != nil {
			break
		}
		if again, err2 := exec.Command("taskset", append([]string{"-c", strconv.Itoa(cpu)}, args...)...).CombinedOutput(); err2 == nil {
			out, err = again, nil
		}
	}
	if err != nil {
		return fmt.Errorf("mount namespace of host %s: %w: %s", h.Name, err, strings.TrimSpace(string(out)))
	}
	return nil
}

var pinning sync.Mutex

// pinFolder prepares the folder of pins: a mount namespace can only be pinned
// on a mount that does not propagate into it.
func pinFolder() error {
	// Hosts get power at the same time: a second mount would hide the pins on the first.
	pinning.Lock()
	defer pinning.Unlock()
	dir := filepath.Join(runRoot, "ns")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if mounted, err := isMountPoint(dir); err != nil || mounted {
		return err
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("binding %s: %w", dir, err)
	}
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making %s private: %w", dir, err)
	}
	return nil
}

func isMountPoint(dir string) (bool, error) {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == dir {
			return true, nil
		}
	}
	return false, nil
}

// enter returns the argument list that runs a command inside the host.
func (h Host) enter(args ...string) []string {
	return append([]string{"nsenter", "--net=" + h.NetNS(), "--mount=" + h.MountNS(), "--uts=" + h.UTSNS(), "--wd=/", "--"}, args...)
}

// Command is a command inside the host, for people and tests: it runs in the
// host's namespaces and cgroup.
func (h Host) Command(ctx context.Context, args ...string) *exec.Cmd {
	script := h.joinScript() + `exec "$@"`
	return exec.CommandContext(ctx, "sh", append([]string{"-c", script, "sh"}, h.enter(args...)...)...)
}

// start starts the host's daemon.
func (l *Lab) start(h Host) error { return l.spawn(h, l.daemon(h), h.LogFile(), h.pidFile()) }

// diskEnv: the hosts of a lab share the disk of a machine that is not theirs. That nine tenths of it, or of its inodes, are in use
// says nothing of the lab, and all of its workers would say at once that they are short of disk. Releases that do not know it go by
// the tenth. The environment of who starts the lab comes first.
var diskEnv = []string{settings.EnvironmentName("disk-pressure-below") + "=1%", settings.EnvironmentName("inode-pressure-below") + "=1%"}

// spawn starts a daemon as a process of its own session whose output goes to a
// log file, and remembers its pid.
func (l *Lab) spawn(h Host, args []string, log, pidFile string) error {
	logFile, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("log of host %s: %w", h.Name, err)
	}
	defer logFile.Close()
	keepDescriptors()
	cmd := h.Command(context.Background(), args...)
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.Dir = "/"
	cmd.Env = append(slices.Clone(diskEnv), os.Environ()...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting %s on host %s: %w", filepath.Base(args[0]), h.Name, err)
	}
	// sh and nsenter exec in place: the pid is the daemon's.
	pid := cmd.Process.Pid
	if err := os.WriteFile(pidFile, []byte(strconv.Itoa(pid)), 0o600); err != nil {
		return err
	}
	// From when the shell has joined the host's cgroup, the pid file tells the truth.
	joining, cancel := context.WithTimeout(context.Background(), beginning)
	defer cancel()
	err = wait.For(joining, time.Millisecond, func() error {
		if isZombie(pid) || h.owns(pid) {
			return nil
		}
		return fmt.Errorf("%s is not in the cgroup of host %s", filepath.Base(args[0]), h.Name)
	})
	return errors.Join(err, cmd.Process.Release())
}

// keepDescriptors keeps what this process got from its caller (a lock file, say)
// from the daemons, which would hold it for as long as they live.
func keepDescriptors() {
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) // before kernel 5.11 they leak, as from any shell
}

// owns says whether a process is in the host's cgroup.
func (h Host) owns(pid int) bool {
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return err == nil && strings.Contains(string(groups), h.CgroupPath()+"/")
}

// daemonPID is the pid of the host's running daemon, 0 when it does not run.
// A pid that was given to another program since is not it: it must be in the host's cgroup.
func (h Host) daemonPID() int { return pidIn(h.pidFile(), h) }

func pidIn(file string, h Host) int {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil || isZombie(pid) || !h.owns(pid) {
		return 0
	}
	return pid
}

// powerCut kills everything on the host and forgets its memory: mounts, /run and namespaces.
func (h Host) powerCut(ctx context.Context) error {
	if err := killAll(ctx, h.CgroupPath()); err != nil {
		return fmt.Errorf("killing host %s: %w", h.Name, err)
	}
	var errs []error
	errs = append(errs, unpin(h.MountNS()), unpin(h.UTSNS()), removeCgroups(ctx, h.CgroupPath()))
	if err := os.RemoveAll(h.runDir()); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
