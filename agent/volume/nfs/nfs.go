// Package nfs mounts folders of NFS servers. The kernel does that by itself, so that a node needs no program of
// nfs-common for version 4, nor for version 3 with mount option nolock. Only version 3 with locks takes mount.nfs, which
// sees to rpc.statd.
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

// Volume is a folder of a server.
type Volume struct {
	Server, Path string
	ReadOnly     bool
	Options      []string // of the mount
}

// String names the volume for messages.
func (v Volume) String() string { return fmt.Sprintf("NFS %s", source(v.Server, v.Path)) }

// Is says that a type of file system is one of NFS.
func Is(fsType string) bool { return fsType == "nfs" || fsType == "nfs4" }

// Node is what mounting takes of the node. The zero value is the node as it is.
type Node struct {
	Patience   time.Duration // for a server that does not answer; 0 = half a minute
	filesystem string        // the list of the kernel's file systems
	resolve    func(ctx context.Context, host string) ([]netip.Addr, error)
	mount      func(ctx context.Context, m remote.Mount) error
	lookPath   func(program string) (string, error)
	run        func(ctx context.Context, about string, program string, args ...string) error
}

func (n Node) complete() Node {
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

// Mount mounts the volume at a folder at which nothing is mounted. It takes no longer than the node's patience, and a
// little to give up.
func (n Node) Mount(ctx context.Context, v Volume, target string) error {
	n = n.complete()
	o, err := ParseOptions(v.Options)
	if err != nil {
		return fmt.Errorf("%s: %w", v, err)
	}
	if v.ReadOnly {
		o.Flags |= unix.MS_RDONLY
	}
	ctx, cancel := context.WithTimeout(ctx, n.Patience)
	defer cancel()
	if err := n.client(ctx); err != nil {
		return fmt.Errorf("%s: %w", v, err)
	}
	addrs, err := n.addresses(ctx, v.Server, o)
	if err != nil {
		return fmt.Errorf("%s: %w", v, err)
	}
	for i, addr := range addrs {
		if err = n.negotiate(ctx, v, o, addr, target); err == nil || !unreachable(err) || i == len(addrs)-1 || ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", v, n.explain(err, v, o))
	}
	return nil
}

// client sees to the NFS client of the kernel.
func (n Node) client(ctx context.Context) error {
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
	why := "there is no modprobe to load it with"
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
		"which may be in a package of its own such as linux-modules-extra; it is looked for again: %s", why)
}

// mostAddresses of a name are tried.
const mostAddresses = 4

func (n Node) addresses(ctx context.Context, server string, o Options) ([]netip.Addr, error) {
	var all []netip.Addr
	if a, err := netip.ParseAddr(strings.Trim(server, "[]")); err == nil {
		all = []netip.Addr{a}
	} else if all, err = n.resolve(ctx, server); err != nil {
		return nil, fmt.Errorf("this node cannot resolve the name of the server (it asks the DNS servers of the node, which know no Services): %w", err)
	}
	var out []netip.Addr
	for _, a := range all {
		if a = a.Unmap(); o.reaches(a) && len(out) < mostAddresses {
			out = append(out, a)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("server %s has no address for mount option proto=%s", server, o.value("proto"))
	}
	return out, nil
}

// errLocks says that version 3 cannot be mounted with locks.
var errLocks = errors.New("locks of NFS version 3 need mount.nfs and rpc.statd on the node: install nfs-common (nfs-utils), " +
	"or set mount option nolock where no two clients lock the same file")

// negotiate tries the versions that are asked for, the newest first.
func (n Node) negotiate(ctx context.Context, v Volume, o Options, addr netip.Addr, target string) error {
	versions := o.versions()
	var first error // what is told where none of several is had: of the newest version that the server has
	for i, version := range versions {
		err := n.once(ctx, v, o, version, addr, target)
		if err == nil {
			return nil
		}
		if first == nil || anyOf(first, unix.EPROTONOSUPPORT) && !errors.Is(err, errLocks) {
			first = err // that there is no such version says least
		}
		if i == len(versions)-1 || ctx.Err() != nil {
			break
		}
		switch {
		case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EINVAL):
		case versions[len(versions)-1] == "3" && anyOf(err, unix.ENOENT, unix.EPERM, unix.EACCES):
			// A server without version 4, or one that shows none of its folders by it.
			if third := n.once(ctx, v, o, "3", addr, target); third == nil {
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

// lacksLocks says that version 3 is not mounted for want of a program.
func (n Node) lacksLocks(o Options) bool {
	_, err := n.lookPath("mount.nfs")
	return err != nil && !o.ownLocks()
}

// once mounts with one version.
func (n Node) once(ctx context.Context, v Volume, o Options, version string, addr netip.Addr, target string) error {
	if version != "3" || o.ownLocks() {
		kind := "nfs"
		if version != "3" {
			kind = "nfs4"
		}
		return n.mount(ctx, remote.Mount{Source: source(v.Server, v.Path), Target: target, Type: kind, Flags: o.Flags, Data: o.data(version, addr)})
	}
	path, err := n.lookPath("mount.nfs")
	if err != nil {
		return errLocks
	}
	return n.run(ctx, target, path, source(v.Server, v.Path), target, "-o", strings.Join(append(o.names(), "vers=3"), ","))
}

// names are the options as mount.nfs reads them.
func (o Options) names() []string {
	out := slices.Clone(o.Rest)
	for name, f := range flags {
		if f.set != 0 && o.Flags&f.set != 0 {
			out = append(out, name)
		}
	}
	slices.Sort(out[len(o.Rest):])
	return out
}

func anyOf(err error, list ...unix.Errno) bool {
	return slices.ContainsFunc(list, func(e unix.Errno) bool { return errors.Is(err, e) })
}

// unreachable says that another address of the server may do.
func unreachable(err error) bool {
	return anyOf(err, unix.ECONNREFUSED, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.ETIMEDOUT, unix.EAFNOSUPPORT)
}

// explain says what to do.
func (n Node) explain(err error, v Volume, o Options) error {
	say := func(text string, args ...any) error { return fmt.Errorf("%s (%w)", fmt.Sprintf(text, args...), err) }
	switch {
	case errors.Is(err, errLocks):
	case errors.Is(err, context.DeadlineExceeded):
		return say("server %s did not answer within %s: see whether it runs and whether this node reaches it; it is tried again", v.Server, n.Patience)
	case anyOf(err, unix.ETIMEDOUT, unix.EHOSTUNREACH, unix.ENETUNREACH):
		return say("this node does not reach server %s; it is tried again", v.Server)
	case errors.Is(err, unix.ECONNREFUSED):
		return say("server %s runs no NFS service; it is tried again", v.Server)
	case anyOf(err, unix.EACCES, unix.EPERM):
		return say("server %s does not let this node mount %s: see its exports", v.Server, v.Path)
	case errors.Is(err, unix.ENOENT):
		return say("server %s exports no %s; with version 4 the path begins at its root of exports (fsid=0)", v.Server, v.Path)
	case errors.Is(err, unix.EPROTONOSUPPORT):
		return say("server %s and the kernel of this node have no version of NFS in common (asked for: %s)", v.Server, strings.Join(o.versions(), ", "))
	case errors.Is(err, unix.EINVAL):
		return say("the kernel of this node refuses the mount options %q", strings.Join(o.Rest, ","))
	case errors.Is(err, unix.ENODEV):
		return say("the kernel of this node lacks a part of its NFS client: load modules nfs, nfsv3 and nfsv4")
	}
	return err
}
