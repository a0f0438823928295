// Package nfs mounts folders of NFS servers with the NFS client of the kernel. Version 4, and
// version 3 with mount option nolock, need no program on the node. Version 3 with locks needs
// mount.nfs, which starts rpc.statd.
package nfs

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/volume/remote"
)

// Volume is a folder that an NFS server exports.
type Volume struct {
	Server, Path string
	ReadOnly     bool
	Options      []string // mount options
}

// String returns the volume as "NFS SERVER:PATH", for messages.
func (v Volume) String() string { return fmt.Sprintf("NFS %s", sourceName(v.Server, v.Path)) }

// IsNFS reports whether fsType, a type in the kernel's mount table, is NFS.
func IsNFS(fsType string) bool { return fsType == "nfs" || fsType == "nfs4" }

// Node mounts NFS volumes on this node. The zero value is ready to use.
type Node struct {
	Patience   time.Duration // limit for a server that does not respond; 0 = 30 s
	filesystem string        // path of the list of file systems that the kernel supports
	resolve    func(ctx context.Context, host string) ([]netip.Addr, error)
	mount      func(ctx context.Context, m remote.Mount) error
	lookPath   func(program string) (string, error)
	run        func(ctx context.Context, about string, program string, args ...string) error
}

func (n Node) withDefaults() Node {
	if n.Patience == 0 {
		n.Patience = 30 * time.Second
	}
	if n.filesystem == "" {
		n.filesystem = "/proc/filesystems"
	}
	if n.resolve == nil {
		n.resolve = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		}
	}
	if n.mount == nil {
		n.mount = func(ctx context.Context, m remote.Mount) error { return m.Do(ctx) }
	}
	if n.lookPath == nil {
		n.lookPath = exec.LookPath
	}
	if n.run == nil {
		n.run = func(ctx context.Context, about, program string, args ...string) error {
			_, err := remote.Run(ctx, exec.Command(program, args...), about)
			return err
		}
	}
	return n
}

// Mount mounts the NFS volume at target, an unused folder. If the server does not respond, it
// returns an error after n.Patience and a short time to abort the mount.
func (n Node) Mount(ctx context.Context, v Volume, target string) error {
	n = n.withDefaults()
	o, err := ParseOptions(v.Options)
	if err != nil {
		return fmt.Errorf("%s: %w", v, err)
	}
	if v.ReadOnly {
		o.Flags |= unix.MS_RDONLY
	}
	ctx, cancel := context.WithTimeout(ctx, n.Patience)
	defer cancel()
	if err := n.ensureClient(ctx); err != nil {
		return fmt.Errorf("%s: %w", v, err)
	}
	addrs, err := n.serverAddresses(ctx, v.Server, o)
	if err != nil {
		return fmt.Errorf("%s: %w", v, err)
	}
	for i, addr := range addrs {
		if err = n.mountAnyVersion(ctx, v, o, addr, target); err == nil || !isUnreachable(err) || i == len(addrs)-1 ||
			ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", v, n.explainError(err, v, o))
	}
	return nil
}

// ensureClient loads the kernel module of the NFS client if the kernel does not support NFS yet.
func (n Node) ensureClient(ctx context.Context) error {
	has := func() (bool, error) {
		f, err := os.Open(n.filesystem)
		if err != nil {
			return false, err
		}
		defer f.Close()
		for in := bufio.NewScanner(f); in.Scan(); {
			if fields := strings.Fields(in.Text()); len(fields) > 0 && fields[len(fields)-1] == "nfs4" {
				return true, nil
			}
		}
		return false, nil
	}
	ok, err := has()
	if ok || err != nil {
		return err
	}
	why := "modprobe is not installed"
	if path, err := n.lookPath("modprobe"); err == nil {
		why = "modprobe has loaded nfs, and the kernel does not serve it"
		if err := n.run(ctx, "modprobe", path, "nfs"); err != nil {
			why = err.Error()
		}
	}
	if ok, err := has(); ok || err != nil {
		return err
	}
	return fmt.Errorf("the kernel of this node has no NFS client: load module nfs (modprobe nfs), "+
		"which may be in a separate package such as linux-modules-extra; this is retried: %s", why)
}

// maxAddresses is the maximum number of addresses of a server's host name that a mount tries.
const maxAddresses = 4

func (n Node) serverAddresses(ctx context.Context, server string, o Options) ([]netip.Addr, error) {
	var all []netip.Addr
	if a, err := netip.ParseAddr(strings.Trim(server, "[]")); err == nil {
		all = []netip.Addr{a}
	} else if all, err = n.resolve(ctx, server); err != nil {
		return nil,
			fmt.Errorf("this node cannot resolve the name of the server (it uses the node's DNS servers, which do not "+
				"resolve Services): %w", err)
	}
	var out []netip.Addr
	for _, a := range all {
		if a = a.Unmap(); o.allowsFamily(a) && len(out) < maxAddresses {
			out = append(out, a)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("server %s has no address for mount option proto=%s", server, o.lastValue("proto"))
	}
	return out, nil
}

// errLocks is returned if NFS version 3 cannot be mounted with locks, because mount.nfs or
// rpc.statd is missing.
var errLocks = errors.New("locks of NFS version 3 need mount.nfs and rpc.statd on the node: install " +
	"nfs-common (nfs-utils), or set mount option nolock where no two clients lock the same file")

// mountAnyVersion mounts the volume from the server address addr at target. It tries the requested
// NFS versions, newest first.
func (n Node) mountAnyVersion(ctx context.Context, v Volume, o Options, addr netip.Addr, target string) error {
	versions := o.candidateVersions()
	var first error // the error to return if all versions fail: that of the newest version that the server supports
	for i, version := range versions {
		err := n.mountVersion(ctx, v, o, version, addr, target)
		if err == nil {
			return nil
		}
		if first == nil || isAnyErrno(first, unix.EPROTONOSUPPORT) && !errors.Is(err, errLocks) {
			first = err // an unsupported version is the least useful error
		}
		if i == len(versions)-1 || ctx.Err() != nil {
			break
		}
		switch {
		case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EINVAL):
		case versions[len(versions)-1] == "3" && isAnyErrno(err, unix.ENOENT, unix.EPERM, unix.EACCES):
			// The server has no version 4, or does not export this folder by it.
			if third := n.mountVersion(ctx, v, o, "3", addr, target); third == nil {
				return nil
			}
			return first
		default:
			return err
		}
	}
	if versions[len(versions)-1] == "3" && len(versions) > 1 && ctx.Err() == nil && n.lacksLocks(o) {
		return fmt.Errorf("server %s does not serve version 4 (%w), and %w", v.Server, first, errLocks)
	}
	return first
}

// lacksLocks reports whether the options require NFS version 3 with locks and mount.nfs, which they
// need, is missing.
func (n Node) lacksLocks(o Options) bool {
	_, err := n.lookPath("mount.nfs")
	return err != nil && !o.hasLocalLocks()
}

// mountVersion mounts the volume from the server address addr at target with one NFS version.
func (n Node) mountVersion(
	ctx context.Context, v Volume, o Options, version string, addr netip.Addr, target string,
) error {
	if version != "3" || o.hasLocalLocks() {
		kind := "nfs"
		if version != "3" {
			kind = "nfs4"
		}
		return n.mount(ctx, remote.Mount{Source: sourceName(v.Server, v.Path), Target: target, Type: kind,
			Flags: o.Flags, Data: o.kernelData(version, addr)})
	}
	path, err := n.lookPath("mount.nfs")
	if err != nil {
		return errLocks
	}
	return n.run(ctx, target, path, sourceName(v.Server, v.Path), target, "-o",
		strings.Join(append(o.mountNFSOptions(), "vers=3"), ","))
}

// mountNFSOptions returns the options for the program mount.nfs.
func (o Options) mountNFSOptions() []string {
	out := slices.Clone(o.Rest)
	for name, f := range mountFlags {
		if f.set != 0 && o.Flags&f.set != 0 {
			out = append(out, name)
		}
	}
	slices.Sort(out[len(o.Rest):])
	return out
}

func isAnyErrno(err error, list ...unix.Errno) bool {
	return slices.ContainsFunc(list, func(e unix.Errno) bool { return errors.Is(err, e) })
}

// isUnreachable reports whether err is specific to one address of the server, so that another
// address may work.
func isUnreachable(err error) bool {
	return isAnyErrno(err, unix.ECONNREFUSED, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.ETIMEDOUT, unix.EAFNOSUPPORT)
}

// explainError adds the likely cause and a remedy to an error of mounting v.
func (n Node) explainError(err error, v Volume, o Options) error {
	say := func(text string, args ...any) error { return fmt.Errorf("%s (%w)", fmt.Sprintf(text, args...), err) }
	switch {
	case errors.Is(err, errLocks):
	case errors.Is(err, context.DeadlineExceeded):
		return say("server %s did not answer within %s: check that it runs and that this node can reach it; this is "+
			"retried", v.Server, n.Patience)
	case isAnyErrno(err, unix.ETIMEDOUT, unix.EHOSTUNREACH, unix.ENETUNREACH):
		return say("this node does not reach server %s; this is retried", v.Server)
	case errors.Is(err, unix.ECONNREFUSED):
		return say("server %s runs no NFS service; this is retried", v.Server)
	case isAnyErrno(err, unix.EACCES, unix.EPERM):
		return say("server %s does not let this node mount %s: check its exports", v.Server, v.Path)
	case errors.Is(err, unix.ENOENT):
		return say("server %s exports no %s; with version 4 the path is relative to its root export (fsid=0)",
			v.Server, v.Path)
	case errors.Is(err, unix.EPROTONOSUPPORT):
		return say("server %s and the kernel of this node support no common version of NFS (requested: %s)", v.Server,
			strings.Join(o.candidateVersions(), ", "))
	case errors.Is(err, unix.EINVAL):
		return say("the kernel of this node refuses the mount options %q", strings.Join(o.Rest, ","))
	case errors.Is(err, unix.ENODEV):
		return say("the kernel of this node lacks a part of its NFS client: load modules nfs, nfsv3 and nfsv4")
	}
	return err
}
