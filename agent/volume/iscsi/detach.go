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

// ErrInUse is returned for a disk that cannot be detached because it is mounted.
var ErrInUse = errors.New("it is still mounted on this node")

// errLoginPending is returned by Detach for a target for which iscsid may still complete a login.
var errLoginPending = errors.New("iscsid may be logging in")

// Detach removes the devices of the disk lun of a target from the kernel. With last, no volume uses
// the target any longer: Detach removes all its devices, logs out, and removes the iscsiadm records
// that were created for volumes. dir is the folder that stores the target's State. It returns an
// error if a device is mounted, and keeps that device. Detach may be repeated, and does nothing if
// nothing was attached.
func (n Node) Detach(ctx context.Context, dir string, lun int, last bool) error {
	n = n.withDefaults()
	state, err := loadState(dir)
	if err != nil {
		return err
	}
	if state.Target == "" {
		return nil // nothing was started
	}
	ours, err := n.volumeSessions(state)
	if err != nil {
		return err
	}
	fail := func(err error) error { return fmt.Errorf("detaching iSCSI target %s: %w", state.Target, err) }
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
	if err := n.logoutAll(ctx, dir, &state, ours); err != nil {
		return fail(err)
	}
	if state.MadeInterface {
		_, err := n.runIscsiadm(ctx, "-m", "iface", "-I", state.Interface, "-o", "delete")
		if err != nil && exitStatus(err) != codeNothingFound && exitStatus(err) != codeRecords {
			return fail(explainError(err, "removing iSCSI interface "+state.Interface, netip.AddrPort{}, n.Patience))
		}
	}
	return removeIfExists(filepath.Join(dir, stateFile))
}

// DetachAll calls Detach for all targets, so that no session, device or iscsiadm record remains
// that was created for volumes. root contains the folders of the targets, as named by FolderName.
// It is for a node that leaves its cluster, when no pod uses a disk any longer. It waits for
// pending logins. A target that cannot be detached keeps its state, so that DetachAll can be
// repeated; it does not prevent the detaching of others.
func (n Node) DetachAll(ctx context.Context, root string) error {
	interfaces, err := listFolders(root)
	if err != nil {
		return err
	}
	var errs []error
	for _, i := range interfaces {
		targets, err := listFolders(i)
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
		if !errors.Is(err, errLoginPending) || wait.Delay(ctx, time.Second) != nil {
			return err
		}
	}
}

// listFolders returns the paths of the folders in dir. The result is empty if dir does not exist.
func listFolders(dir string) ([]string, error) {
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

// volumeSessions returns the sessions in the kernel that were created for volumes, according to
// state, including sessions that are still being created.
func (n Node) volumeSessions(state State) ([]Session, error) {
	all, err := n.Kernel.Sessions()
	if err != nil {
		return nil, err
	}
	portals := state.parsedPortals()
	return slices.DeleteFunc(all, func(s Session) bool {
		_, made := portals[s.Portal]
		return !made || !sameName(s.Target, state.Target) || s.Interface != state.Interface
	}), nil
}

// removeUnit removes the block device of a logical unit from the kernel. It returns an error if the
// device, or a partition or other device on it, is mounted.
func (n Node) removeUnit(ctx context.Context, u Unit) error {
	if u.Block == "" {
		return nil
	}
	numbers := n.Kernel.deviceNumbers(u)
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !slices.Contains(numbers, fmt.Sprintf("%d:%d", m.Major, m.Minor)), false
	})
	if err != nil {
		return fmt.Errorf("cannot determine whether %s is mounted: %w", u.Block, err)
	}
	if len(mounts) > 0 {
		return fmt.Errorf("device %s (LUN %d): %w, at %s", u.Block, u.LUN, ErrInUse, mounts[0].Mountpoint)
	}
	ctx, cancel := context.WithTimeout(ctx, n.Patience)
	defer cancel()
	if m := n.Kernel.multipathDevice(u); m != "" {
		if path, err := exec.LookPath("multipath"); err == nil {
			if _, err := remote.Run(ctx, exec.Command(path, "-f", filepath.Join(n.Kernel.Dev, m)),
				"multipath "+m); err != nil {
				return fmt.Errorf("removing the multipath device %s: %w", m, err)
			}
		}
	}
	if err := remote.Write(ctx, filepath.Join(u.folder, "delete"), "1"); err != nil {
		return fmt.Errorf("removing device %s (LUN %d): %w", u.Block, u.LUN, err)
	}
	return nil
}

// logoutAll logs out of the sessions ours, and removes the iscsiadm records that were created for
// volumes. dir and state are the target's folder and State.
func (n Node) logoutAll(ctx context.Context, dir string, state *State, ours []Session) error {
	var errs []error
	for p, was := range state.parsedPortals() {
		at := append(recordArgs(cmp.Or(was.Name, state.Target), state.Interface, p, was.Group), "--logout")
		is := func(s Session) bool { return s.Portal == p }
		switch there := slices.ContainsFunc(ours, is); {
		case !there && was.Asked != nil && time.Since(*was.Asked) < loginPending &&
			time.Since(*was.Asked) > -loginPending:
			errs = append(errs, fmt.Errorf("%w at portal %s: it gives up %s after the request", errLoginPending,
				p, loginPending))
			continue
		case there:
			if _, err := n.runIscsiadm(ctx, at...); err != nil && exitStatus(err) != codeNothingFound &&
				exitStatus(err) != codeNoSession {
				errs = append(errs, explainError(err, "logging out at portal "+p.String(), p, n.Patience))
				continue
			}
			left, err := n.volumeSessions(*state)
			if err != nil || slices.ContainsFunc(left, is) {
				errs = append(errs, errors.Join(fmt.Errorf("the session with portal %s still exists", p), err))
				continue
			}
		}
		if err := n.deleteRecord(ctx, state.Target, state.Interface, p, was); err != nil {
			errs = append(errs, err)
			continue
		}
		for name := range state.Portals {
			if at, err := ParsePortal(name); err == nil && at == p {
				delete(state.Portals, name)
			}
		}
		if err := state.saveTo(dir); err != nil {
			return err
		}
	}
	return errors.Join(errs...)
}

// FolderName returns the name of the folder for the target and the interface of a disk: a relative
// path.
func FolderName(d Disk) string {
	return filepath.Join(strings.ReplaceAll(d.Interface, "/", "_"), d.Target)
}
