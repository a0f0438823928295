//go:build linux

// Package container creates containers and executes processes in them through libcontainer. It is
// the only package that imports libcontainer, and the only cgo code. It is linked into keelson-oci
// only: libcontainer re-executes its own binary for every process, so that binary must be small.
//
// A keelson-oci process performs one operation and exits. The start of a created container does not
// need keelson-oci, because the shim opens libcontainer's exec fifo. The deletion does not need it
// either, because the agent removes cgroups and directories.
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

// Create creates a container that waits to be started. It returns the PID of the container's first
// process and the resolved user. The calling goroutine stays locked to its thread, which enters a
// new mount namespace. The calling process must exit soon afterwards.
func Create(request *bundle.Create, streams Streams) (pid int, answer bundle.ResolvedUser, err error) {
	runtime.LockOSThread()
	if request.Overlay != nil {
		if err := mountRoot(request.Spec.Root.Path, request.Overlay); err != nil {
			return 0, answer, err
		}
	}
	if answer, err = request.User.Resolve(newOpener(request.Spec.Root.Path)); err != nil {
		return 0, answer, err
	}
	// supplementary groups of its devices
	answer.Groups = append(answer.Groups, request.Spec.Process.User.AdditionalGids...)
	request.Spec.Process.User = specs.User{UID: answer.UID, GID: answer.GID, AdditionalGids: answer.Groups}
	for inside, host := range request.Volumes {
		if err := fillVolume(request.Spec.Root.Path, inside, host); err != nil {
			return 0, answer, fmt.Errorf("prepare volume %s of the image: %w", inside, err)
		}
	}
	config, err := specconv.CreateLibcontainerConfig(&specconv.CreateOpts{CgroupName: request.ID, Spec: request.Spec})
	if err != nil {
		return 0, answer, fmt.Errorf("convert the request: %w", err)
	}
	if request.DefaultSeccomp {
		config.Seccomp = defaultSeccomp(request.Spec.Process.Capabilities)
	}
	c, err := libcontainer.Create(request.StateRoot, request.ID, config)
	if err != nil {
		return 0, answer, err
	}
	p, err := convertProcess(request.Spec.Process, streams)
	if err == nil {
		p.Init = true
		err = c.Start(p)
	}
	if err != nil {
		return 0, answer, errors.Join(err, os.RemoveAll(filepath.Join(request.StateRoot, request.ID)))
	}
	pid, err = p.Pid()
	return pid, answer, err
}

// Exec starts a process in a container and returns its PID.
func Exec(request *bundle.Exec, streams Streams) (pid int, err error) {
	c, err := libcontainer.Load(request.StateRoot, request.ID)
	if err != nil {
		return 0, fmt.Errorf("load container: %w", err)
	}
	p, err := convertProcess(request.Process, streams)
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

// convertProcess converts an OCI process to a libcontainer process.
func convertProcess(spec *specs.Process, streams Streams) (*libcontainer.Process, error) {
	lp := &libcontainer.Process{
		Args: spec.Args, Env: spec.Env, Cwd: spec.Cwd, UID: int(spec.User.UID), GID: int(spec.User.GID),
		NoNewPrivileges: &spec.NoNewPrivileges, AppArmorProfile: spec.ApparmorProfile,
		LogLevel: logErrors,
	}
	for _, g := range spec.User.AdditionalGids {
		lp.AdditionalGroups = append(lp.AdditionalGroups, int(g))
	}
	if c := spec.Capabilities; c != nil {
		lp.Capabilities = &configs.Capabilities{Bounding: c.Bounding, Effective: c.Effective,
			Inheritable: c.Inheritable, Permitted: c.Permitted, Ambient: c.Ambient}
	}
	for _, r := range spec.Rlimits {
		kind, ok := rlimits[r.Type]
		if !ok {
			return nil, fmt.Errorf("unknown resource limit %s", r.Type)
		}
		lp.Rlimits = append(lp.Rlimits, configs.Rlimit{Type: kind, Hard: r.Hard, Soft: r.Soft})
	}
	if streams.Console != nil {
		lp.ConsoleSocket = streams.Console
		if spec.ConsoleSize != nil {
			lp.ConsoleWidth, lp.ConsoleHeight = uint16(spec.ConsoleSize.Width), uint16(spec.ConsoleSize.Height)
		}
		return lp, nil
	}
	lp.Stdin, lp.Stdout, lp.Stderr = streams.Stdin, streams.Stdout, streams.Stderr
	return lp, nil
}

// newOpener returns a function that opens regular files below root, the directory of the image.
// Symbolic links cannot lead out of root.
func newOpener(root string) func(string) (io.ReadCloser, error) {
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
