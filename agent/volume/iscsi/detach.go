package iscsi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"

	"keelson.dev/keelson/agent/volume/remote"
	"keelson.dev/keelson/internal/wait"
)

// ErrInUse says that a disk is not taken away, since something of it is mounted.
var ErrInUse = errors.New("something of it is mounted on this node still")

// errAsked says that a target is not left, since a login may come yet.
var errAsked = errors.New("iscsid may be logging in")

// Detach takes a disk of the target away that no volume of the node uses any more: its devices, while other disks of the
// target stay; with the last of them the sessions and records that were made for volumes. dir is the folder of the target and
// the interface. Nothing is taken away that is mounted. Safe to repeat, and when there is nothing.
func (n Node) Detach(ctx context.Context, dir string, lun int, last bool) error {
	n = n.complete()
	state, err := load(dir)
	if err != nil {
		return err
	}
	if state.Target == "" {
		return nil // nothing was begun
	}
	ours, err := n.ours(state)
	if err != nil {
		return err
	}
	fail := func(err error) error { return fmt.Errorf("taking iSCSI target %s away: %w", state.Target, err) }
	for _, s := range ours {
		units, err := n.Kernel.Units(s)
		if err != nil {
			return fail(err)
		}
		for _, u := range units {
			if u.LUN != lun && !last {
				continue
			}
			if err := n.removeUnit(ctx, u); err != nil {
				return fail(err)
			}
		}
	}
	if !last {
		return nil
	}
	if err := n.logout(ctx, dir, &state, ours); err != nil {
		return fail(err)
	}
	if state.MadeInterface {
		_, err := n.admin(ctx, "-m", "iface", "-I", state.Interface, "-o", "delete")
		if err != nil && code(err) != codeNothingFound && code(err) != codeRecords {
			return fail(explain(err, "removing iSCSI interface "+state.Interface, netip.AddrPort{}, n.Patience))
		}
	}
	return remove(filepath.Join(dir, stateFile))
}

// DetachAll takes away what was made for volumes of all targets, whose folders are below root as Name calls them: for a node that leaves
// its cluster, on which nobody brings disks any more. A login that nobody waits for is waited for here. What cannot go keeps its state,
// so that it may be asked again, and keeps nothing else from going.
func (n Node) DetachAll(ctx context.Context, root string) error {
	interfaces, err := folders(root)
	if err != nil {
		return err
	}
	var errs []error
	for _, i := range interfaces {
		targets, err := folders(i)
		errs = append(errs, err)
		for _, dir := range targets {
			errs = append(errs, n.detachWhole(ctx, dir))
		}
	}
	return errors.Join(errs...)
}

func (n Node) detachWhole(ctx context.Context, dir string) error {
	for {
		err := n.Detach(ctx, dir, 0, true)
		if !errors.Is(err, errAsked) || wait.Delay(ctx, time.Second) != nil {
			return err
		}
	}
}

// folders are those in a folder, which may not be there.
func folders(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing iSCSI targets of the node: %w", err)
	}
	var all []string
	for _, e := range entries {
		if e.IsDir() {
			all = append(all, filepath.Join(dir, e.Name()))
		}
	}
	return all, nil
}

// ours are the sessions that were made for volumes, or are being made.
func (n Node) ours(state State) ([]Session, error) {
	all, err := n.Kernel.Sessions()
	if err != nil {
		return nil, err
	}
	portals := state.portals()
	return slices.DeleteFunc(all, func(s Session) bool {
		_, made := portals[s.Portal]
		return !made || !sameName(s.Target, state.Target) || s.Interface != state.Interface
	}), nil
}

// removeUnit has the kernel forget a device, once it is proven that nothing of it is mounted.
func (n Node) removeUnit(ctx context.Context, u Unit) error {
	if u.Block == "" {
		return nil
	}
	numbers := n.Kernel.numbers(u)
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !slices.Contains(numbers, fmt.Sprintf("%d:%d", m.Major, m.Minor)), false
	})
	if err != nil {
		return fmt.Errorf("nobody knows whether %s is mounted: %w", u.Block, err)
	}
	if len(mounts) > 0 {
		return fmt.Errorf("device %s (LUN %d): %w, at %s", u.Block, u.LUN, ErrInUse, mounts[0].Mountpoint)
	}
	ctx, cancel := context.WithTimeout(ctx, n.Patience)
	defer cancel()
	if m := n.Kernel.multipath(u); m != "" {
		if path, err := exec.LookPath("multipath"); err == nil {
			if _, err := remote.Run(ctx, exec.Command(path, "-f", filepath.Join(n.Kernel.Dev, m)), "multipath "+m); err != nil {
				return fmt.Errorf("removing the multipath device %s: %w", m, err)
			}
		}
	}
	if err := remote.Write(ctx, filepath.Join(u.folder, "delete"), "1"); err != nil {
		return fmt.Errorf("removing device %s (LUN %d): %w", u.Block, u.LUN, err)
	}
	return nil
}

// logout ends the sessions that were made for volumes, and removes their records.
func (n Node) logout(ctx context.Context, dir string, state *State, ours []Session) error {
	var errs []error
	for p, was := range state.portals() {
		at := append(recordOf(cmp.Or(was.Name, state.Target), state.Interface, p, was.Group), "--logout")
		is := func(s Session) bool { return s.Portal == p }
		switch there := slices.ContainsFunc(ours, is); {
		case !there && was.Asked != nil && time.Since(*was.Asked) < loginPending && time.Since(*was.Asked) > -loginPending:
			errs = append(errs, fmt.Errorf("%w at portal %s still: it has given that up %s after it was asked", errAsked, p, loginPending))
			continue
		case there:
			if _, err := n.admin(ctx, at...); err != nil && code(err) != codeNothingFound && code(err) != codeNoSession {
				errs = append(errs, explain(err, "logging out at portal "+p.String(), p, n.Patience))
				continue
			}
			left, err := n.ours(*state)
			if err != nil || slices.ContainsFunc(left, is) {
				errs = append(errs, errors.Join(fmt.Errorf("the session with portal %s is there still", p), err))
				continue
			}
		}
		if err := n.forget(ctx, state.Target, state.Interface, p, was); err != nil {
			errs = append(errs, err)
			continue
		}
		for name := range state.Portals {
			if at, err := ParsePortal(name); err == nil && at == p {
				delete(state.Portals, name)
			}
		}
		if err := state.save(dir); err != nil {
			return err
		}
	}
	return errors.Join(errs...)
}

// Name is how a target and an interface are called in paths.
func Name(d Disk) string { return filepath.Join(strings.ReplaceAll(d.Interface, "/", "_"), d.Target) }
