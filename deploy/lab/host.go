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

// privateFolders are the folders that each host has on its own disk. Each entry is the path on the
// host and the name of the bind-mounted folder below Host.stateDir.
var privateFolders = [][2]string{
	{"/var/lib/keelson", "lib"},
	{"/var/lib/kubelet", "kubelet"},
	{"/var/log/pods", "pods"},
	{"/var/log/containers", "loglinks"},
	{"/etc/cni/net.d", "cni"},
	{"/etc/keelson", "etc"},
}

// hostBuilder creates the bridges and the hosts of a lab, and starts the daemons of the hosts. The
// programs and their arguments follow from the configuration. It does not wait until a daemon is
// ready.
type hostBuilder struct{ config *Config }

// createHost creates the cgroup, the folders, and the mount and UTS namespaces of the host h. It
// starts no process. The folders on the host's disk (Host.stateDir) survive a simulated power
// failure; the host's /run does not.
func (hb hostBuilder) createHost(h Host) error {
	for _, b := range privateFolders {
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
	if err := preparePinFolder(); err != nil {
		return err
	}
	for _, pin := range []string{h.MountNS(), h.UTSNS()} {
		if err := os.WriteFile(pin, nil, 0o600); err != nil {
			return err
		}
	}
	var script strings.Builder
	// Pinned namespaces of other hosts, even of other labs, are unmounted in the new mount
	// namespace. Otherwise it would keep them alive.
	script.WriteString("umount -lR /run/netns /run/keelson-lab*/ns 2>/dev/null\n")
	script.WriteString("set -e\nmount -t tmpfs -o mode=755,size=256m keelson-lab /run\nmkdir -p /run/lock /run/netns\n")
	for _, b := range privateFolders {
		fmt.Fprintf(&script, "mount --bind %s %s\n", filepath.Join(h.stateDir(), b[1]), b[0])
	}
	if hb.config.ControlPlaneFiles != "" && h.Role == RoleControlPlane {
		script.WriteString("mount --bind \"$1\" /etc/keelson\n")
	}
	if hb.config.CNIBinDir != "" && h.Role == RoleWorker {
		fmt.Fprintf(&script, "mount --bind %s /opt/cni/bin\n", hb.config.CNIBinDir)
	}
	fmt.Fprintf(&script, "hostname %s\n", h.Name)
	return h.makeNamespaces(script.String(), hb.config.ControlPlaneFiles)
}

// makeNamespaces creates the mount and UTS namespaces of the host h, and runs a shell script in
// them and in the host's network namespace. It pins the mount and UTS namespaces by bind mounts, so
// that they exist without a process. The script gets files as its argument $1.
func (h Host) makeNamespaces(script, files string) error {
	args := []string{"nsenter", "--net=" + h.NetNS(), "unshare", "--mount=" + h.MountNS(), "--uts=" + h.UTSNS(),
		"--propagation", "private", "sh", "-c", script, "sh", files}
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	// The kernel allows the bind mount of a mount namespace only in one with a lower number. Some
	// kernels (6.18) assign numbers per processor. In the mount namespace of a container, the bind
	// mount then only succeeds on the processor that created that namespace.
	for cpu := range runtime.NumCPU() {
		if err == nil {
			break
		}
		if pinned, lookErr := isMountPoint(h.MountNS()); pinned || lookErr != nil {
			break
		}
		if again, err2 := exec.Command("taskset", append([]string{"-c", strconv.Itoa(cpu)}, args...)...).
			CombinedOutput(); err2 == nil {
			out, err = again, nil
		}
	}
	if err != nil {
		return fmt.Errorf("mount namespace of host %s: %w: %s", h.Name, err, strings.TrimSpace(string(out)))
	}
	return nil
}

var pinFolderMu sync.Mutex

// preparePinFolder creates the folder in which namespaces are pinned by bind mounts, and makes it a
// private mount. A mount namespace can only be pinned on a mount that does not propagate into it.
func preparePinFolder() error {
	// Hosts are created concurrently. A second mount would hide the namespaces pinned on the first.
	pinFolderMu.Lock()
	defer pinFolderMu.Unlock()
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

// enterArgs returns a command line that runs args in the namespaces of the host h, by nsenter.
func (h Host) enterArgs(args ...string) []string {
	return append([]string{"nsenter", "--net=" + h.NetNS(), "--mount=" + h.MountNS(), "--uts=" + h.UTSNS(), "--wd=/",
		"--"}, args...)
}

// Command returns a command, not yet started, that runs args in the namespaces and the cgroup of
// the host h.
func (h Host) Command(ctx context.Context, args ...string) *exec.Cmd {
	script := h.joinScript() + `exec "$@"`
	return exec.CommandContext(ctx, "sh", append([]string{"-c", script, "sh"}, h.enterArgs(args...)...)...)
}

// startDaemon starts the daemon of the host h in the background.
func (hb hostBuilder) startDaemon(h Host) error {
	return hb.spawnDaemon(h, hb.daemonArgs(h), h.LogFile(), h.pidFile())
}

// diskEnv are environment variables by which agents report disk pressure only below 1 % of free
// space. The hosts of a lab share the disk of the machine. With the default values, other data on
// that disk could cause disk pressure on all workers at once. Variables in the environment of this
// process take precedence.
var diskEnv = []string{settings.EnvironmentName("disk-pressure-below") + "=1%",
	settings.EnvironmentName("inode-pressure-below") + "=1%"}

// spawnDaemon starts args as the daemon of the host h in a new session. It appends the output to
// the file log, and writes the PID to pidFile. It returns when the daemon is in the host's cgroup
// or has exited.
func (hb hostBuilder) spawnDaemon(h Host, args []string, log, pidFile string) error {
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
	// sh and nsenter replace themselves by exec, so this is the PID of the daemon.
	pid := cmd.Process.Pid
	if err := os.WriteFile(pidFile, []byte(strconv.Itoa(pid)), 0o600); err != nil {
		return err
	}
	// daemonPID ignores a PID outside the host's cgroup, and the shell joins the cgroup at its
	// start.
	joining, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	err = wait.For(joining, time.Millisecond, func() error {
		if isZombie(pid) || h.ownsProcess(pid) {
			return nil
		}
		return fmt.Errorf("%s is not in the cgroup of host %s", filepath.Base(args[0]), h.Name)
	})
	return errors.Join(err, cmd.Process.Release())
}

// keepDescriptors sets the close-on-exec flag of all open file descriptors except 0 to 2. Daemons
// then do not inherit them, for example the descriptor of a lock file.
func keepDescriptors() {
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) // before kernel 5.11 it fails
}

// ownsProcess reports whether the process with a PID is in the cgroup of the host h.
func (h Host) ownsProcess(pid int) bool {
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return err == nil && strings.Contains(string(groups), h.CgroupPath()+"/")
}

// daemonPID returns the PID of the host's running daemon, or 0. It ignores the recorded PID if that
// PID now belongs to a process outside the host's cgroup.
func (h Host) daemonPID() int { return readDaemonPID(h.pidFile(), h) }

func readDaemonPID(file string, h Host) int {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil || isZombie(pid) || !h.ownsProcess(pid) {
		return 0
	}
	return pid
}

// cutPower simulates a power failure of the host h. It kills all processes of h, and removes the
// cgroup of h, its /run, and its mount and UTS namespaces.
func (h Host) cutPower(ctx context.Context) error {
	if err := killCgroup(ctx, h.CgroupPath()); err != nil {
		return fmt.Errorf("killing host %s: %w", h.Name, err)
	}
	var errs []error
	errs = append(errs, unpinNamespace(h.MountNS()), unpinNamespace(h.UTSNS()), removeCgroups(ctx, h.CgroupPath()))
	if err := os.RemoveAll(h.runDir()); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
