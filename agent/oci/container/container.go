//go:build linux

// Package container creates containers and executes processes in them through libcontainer. It is
// the only package that imports libcontainer and the only cgo code. It is linked into keelson-oci
// only: libcontainer re-executes its own binary for every process, so that binary must be small.
//
// A keelson-oci process performs one operation and exits. Starting a created container needs no
// process, because the shim opens libcontainer's exec fifo. Deleting one needs none either, because
// the agent removes cgroups and directories.
package container

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	_ "github.com/opencontainers/cgroups/devices" // device rules, v1 and v2
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	_ "github.com/opencontainers/runc/libcontainer/nsenter" // the first stage of every init, in C
	"github.com/opencontainers/runc/libcontainer/specconv"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"keelson.dev/keelson/agent/oci/bundle"
	"keelson.dev/keelson/internal/safepath"
)

// Streams are the standard streams of the process. With a terminal, Console is the socket to which
// the terminal is sent.
type Streams struct {
	Stdin, Stdout, Stderr *os.File
	Console               *os.File
}

// Init runs the second stage of a container's init. It does not return.
func Init() { libcontainer.Init() }

// Create creates a container that waits to be started. It returns the PID of its first process and
// the resolved user. The calling goroutine stays locked to its thread, which enters a new mount
// namespace. The caller must exit soon after.
func Create(r *bundle.Create, s Streams) (pid int, answer bundle.Answer, err error) {
	runtime.LockOSThread()
	if r.Overlay != nil {
		if err := mountRoot(r.Spec.Root.Path, r.Overlay); err != nil {
			return 0, answer, err
		}
	}
	if answer, err = r.User.Resolve(opener(r.Spec.Root.Path)); err != nil {
		return 0, answer, err
	}
	answer.Groups = append(answer.Groups, r.Spec.Process.User.AdditionalGids...) // supplementary groups of its devices
	r.Spec.Process.User = specs.User{UID: answer.UID, GID: answer.GID, AdditionalGids: answer.Groups}
	for inside, host := range r.Volumes {
		if err := fillVolume(r.Spec.Root.Path, inside, host); err != nil {
			return 0, answer, fmt.Errorf("prepare volume %s of the image: %w", inside, err)
		}
	}
	config, err := specconv.CreateLibcontainerConfig(&specconv.CreateOpts{CgroupName: r.ID, Spec: r.Spec})
	if err != nil {
		return 0, answer, fmt.Errorf("convert the request: %w", err)
	}
	if r.DefaultSeccomp {
		config.Seccomp = defaultSeccomp(r.Spec.Process.Capabilities)
	}
	c, err := libcontainer.Create(r.StateRoot, r.ID, config)
	if err != nil {
		return 0, answer, err
	}
	p, err := process(r.Spec.Process, s)
	if err == nil {
		p.Init = true
		err = c.Start(p)
	}
	if err != nil {
		return 0, answer, errors.Join(err, os.RemoveAll(filepath.Join(r.StateRoot, r.ID)))
	}
	pid, err = p.Pid()
	return pid, answer, err
}

// Exec starts a process in a container and returns its PID.
func Exec(r *bundle.Exec, s Streams) (pid int, err error) {
	c, err := libcontainer.Load(r.StateRoot, r.ID)
	if err != nil {
		return 0, fmt.Errorf("load container: %w", err)
	}
	p, err := process(r.Process, s)
	if err != nil {
		return 0, err
	}
	if err := c.Start(p); err != nil {
		return 0, err
	}
	return p.Pid()
}

// logErrors is the logrus level "error". At the default level every init would write debug messages
// to a pipe.
const logErrors = "2"

// process converts an OCI process to a libcontainer process.
func process(p *specs.Process, s Streams) (*libcontainer.Process, error) {
	lp := &libcontainer.Process{
		Args: p.Args, Env: p.Env, Cwd: p.Cwd, UID: int(p.User.UID), GID: int(p.User.GID),
		NoNewPrivileges: &p.NoNewPrivileges, AppArmorProfile: p.ApparmorProfile,
		LogLevel: logErrors,
	}
	for _, g := range p.User.AdditionalGids {
		lp.AdditionalGroups = append(lp.AdditionalGroups, int(g))
	}
	if c := p.Capabilities; c != nil {
		lp.Capabilities = &configs.Capabilities{Bounding: c.Bounding, Effective: c.Effective,
			Inheritable: c.Inheritable, Permitted: c.Permitted, Ambient: c.Ambient}
	}
	for _, r := range p.Rlimits {
		kind, ok := rlimits[r.Type]
		if !ok {
			return nil, fmt.Errorf("unknown resource limit %s", r.Type)
		}
		lp.Rlimits = append(lp.Rlimits, configs.Rlimit{Type: kind, Hard: r.Hard, Soft: r.Soft})
	}
	if s.Console != nil {
		lp.ConsoleSocket = s.Console
		if p.ConsoleSize != nil {
			lp.ConsoleWidth, lp.ConsoleHeight = uint16(p.ConsoleSize.Width), uint16(p.ConsoleSize.Height)
		}
		return lp, nil
	}
	lp.Stdin, lp.Stdout, lp.Stderr = s.Stdin, s.Stdout, s.Stderr
	return lp, nil
}

// opener returns a function that opens regular files of the image at root. Symbolic links are
// resolved within root.
func opener(root string) func(string) (io.ReadCloser, error) {
	return func(name string) (io.ReadCloser, error) {
		f, err := safepath.OpenRegularInRoot(root, name)
		if err != nil {
			return nil, err // return nil, not a nil *os.File in a non-nil interface
		}
		return f, nil
	}
}

// fillVolume copies the directory inside of the image at root into the empty directory host.
func fillVolume(root, inside, host string) error {
	held, err := safepath.OpenInRoot(root, inside)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer held.Close()
	sub, err := os.OpenRoot(safepath.ProcPath(held))
	if err != nil {
		return err
	}
	defer sub.Close()
	return os.CopyFS(host, sub.FS())
}
