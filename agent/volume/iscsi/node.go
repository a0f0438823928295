package iscsi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"keelson.dev/keelson/agent/volume/remote"
)

// Node is what bringing disks takes of the node. The zero value is the node as it is.
type Node struct {
	Patience time.Duration // for a portal that does not answer, for each step; 0 = half a minute
	Kernel   Kernel        // zero: /sys and /dev
	Log      *slog.Logger  // may be nil
}

func (n Node) complete() Node {
	if n.Patience == 0 {
		n.Patience = 30 * time.Second
	}
	if n.Kernel == (Kernel{}) {
		n.Kernel = Kernel{Sys: "/sys", Dev: "/dev"}
	}
	if n.Log == nil {
		n.Log = slog.New(slog.DiscardHandler)
	}
	return n
}

// loginTries and loginSeconds bound what iscsid does for one login, which goes on when nobody waits for it any more.
const (
	loginTries   = 1
	loginSeconds = 15
	loginPending = (loginTries*loginSeconds + 5) * time.Second
)

// admin runs iscsiadm, which ends when the node's patience does.
func (n Node) admin(ctx context.Context, args ...string) ([]byte, error) {
	path, err := exec.LookPath("iscsiadm")
	if err != nil {
		return nil, fmt.Errorf("iscsiadm is not on this node: install open-iscsi (iscsi-initiator-utils), and have iscsid run: %w", exec.ErrNotFound)
	}
	ctx, cancel := context.WithTimeout(ctx, n.Patience)
	defer cancel()
	out, err := remote.Run(ctx, exec.Command(path, args...), "iscsiadm "+strings.Join(args, " "))
	var failed *remote.Failed
	if errors.As(err, &failed) {
		failed.Said = brief(failed.Said)
	}
	return out, err
}

// brief is what iscsiadm says on one line, each thing once.
func brief(said string) string {
	var lines []string
	for line := range strings.Lines(said) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "iscsiadm: ")
		if line != "" && !slices.Contains(lines, line) && len(lines) < 5 {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "; ")
}

// Attach brings a disk and returns its device. dir is the folder of the target and the interface; who calls does so for one
// Disk of it at a time. The disk is there already where it was brought before.
func (n Node) Attach(ctx context.Context, d Disk, l Login, dir string) (device string, err error) {
	n = n.complete()
	if device, err := n.Device(d); device != "" || err != nil {
		return device, err
	}
	state, err := load(dir)
	if err != nil {
		return "", err
	}
	state.Target, state.Interface = d.Target, d.Interface
	var mu sync.Mutex // of the state, in memory and on disk
	save := func(change func(*State)) error {
		mu.Lock()
		defer mu.Unlock()
		change(&state)
		return state.save(dir)
	}
	if err := n.ownInterface(ctx, d, save); err != nil {
		return "", fmt.Errorf("%s: %w", d, err)
	}
	errs := n.connect(ctx, d, l, save)
	device, found, err := n.find(ctx, d)
	if device != "" {
		if err := errors.Join(errs...); err != nil {
			n.Log.Warn("an iSCSI disk is reached by some of its portals alone", "disk", d.String(), "error", err)
		}
		return device, nil
	}
	if !found || err == nil {
		err = errors.Join(append(errs, err)...)
	}
	return "", fmt.Errorf("%s: %w", d, err)
}

// Device is that of a disk which was brought before, "" for none that can be used.
func (n Node) Device(d Disk) (string, error) {
	n = n.complete()
	all, err := n.sessions(d)
	if err != nil {
		return "", err
	}
	for _, s := range all {
		if u, ok, err := n.Kernel.unit(s, d.LUN); err != nil {
			return "", err
		} else if ok && s.Up {
			return n.path(u), nil
		}
	}
	return "", nil
}

// Has says whether the kernel has found a disk by whichever session with its target, also one that is not up.
func (n Node) Has(d Disk) (bool, error) {
	n = n.complete()
	all, err := n.Kernel.Sessions()
	if err != nil {
		return false, err
	}
	for _, s := range all {
		if !sameName(s.Target, d.Target) {
			continue
		}
		units, err := n.Kernel.Units(s)
		if err != nil || slices.ContainsFunc(units, func(u Unit) bool { return u.LUN == d.LUN }) {
			return true, err
		}
	}
	return false, nil
}

// path is the device by which a unit is used.
func (n Node) path(u Unit) string {
	if m := n.Kernel.multipath(u); m != "" {
		return filepath.Join(n.Kernel.Dev, m)
	}
	return filepath.Join(n.Kernel.Dev, u.Block)
}

// sessions are those with the disk's target by its interface, that with the first portal first.
func (n Node) sessions(d Disk) ([]Session, error) {
	all, err := n.Kernel.Sessions()
	if err != nil {
		return nil, err
	}
	var out []Session
	for _, p := range d.Portals {
		for _, s := range all {
			if sameName(s.Target, d.Target) && s.Interface == d.Interface && s.Portal == p {
				out = append(out, s)
			}
		}
	}
	return out, nil
}

// find has the kernel look for a disk by the sessions that are up, and returns its device when it is there. found says that
// there are such sessions.
func (n Node) find(ctx context.Context, d Disk) (device string, found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, n.Patience)
	defer cancel()
	all, err := n.sessions(d)
	if err != nil {
		return "", false, err
	}
	all = slices.DeleteFunc(all, func(s Session) bool { return !s.Up })
	if len(all) == 0 {
		return "", false, nil
	}
	var errs []error
	for _, s := range all {
		scan := filepath.Join(n.Kernel.Sys, "class", "scsi_host", "host"+s.host, "scan")
		errs = append(errs, remote.Write(ctx, scan, "0 "+s.id+" "+strconv.Itoa(d.LUN)))
	}
	for _, s := range all {
		for { // the kernel says when it has found a unit, and makes the device of it a little later
			u, ok, err := n.Kernel.unit(s, d.LUN)
			if ok {
				return n.path(u), true, nil
			}
			units, uerr := n.Kernel.Units(s)
			if err = errors.Join(err, uerr); err != nil {
				return "", true, err
			}
			if !slices.ContainsFunc(units, func(u Unit) bool { return u.LUN == d.LUN }) || ctx.Err() != nil {
				break
			}
			pause(ctx)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return "", true, fmt.Errorf("looking for the disk: %w", err)
	}
	return "", true, fmt.Errorf("the target has no disk as LUN %d for this node's initiator: see the target's LUNs, and whom it maps them to", d.LUN)
}

// step is how often the kernel is looked at for what it is about.
const step = 50 * time.Millisecond

func pause(ctx context.Context) {
	t := time.NewTimer(step)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// ownInterface makes the interface of an initiator with a name of its own, unless it is there and says the same. Any other has
// to be there.
func (n Node) ownInterface(ctx context.Context, d Disk, save func(func(*State)) error) error {
	if d.Initiator == "" && d.Interface == DefaultInterface {
		return nil
	}
	if d.Initiator == "" {
		_, err := n.admin(ctx, "-m", "iface", "-I", d.Interface, "-o", "show")
		return explain(err, "reading iSCSI interface "+d.Interface+" of this node", netip.AddrPort{}, n.Patience)
	}
	told, err := n.admin(ctx, "-m", "iface", "-I", d.Interface, "-o", "show")
	if err == nil && sameName(value(told, "iface.initiatorname"), d.Initiator) {
		return nil
	}
	if err == nil {
		if all, serr := n.Kernel.Sessions(); serr != nil || slices.ContainsFunc(all, func(s Session) bool { return s.Interface == d.Interface }) {
			return errors.Join(fmt.Errorf("interface %s goes by initiator name %s here, and is in use", d.Interface, value(told, "iface.initiatorname")), serr)
		}
	}
	like, err := n.admin(ctx, "-m", "iface", "-I", d.Like, "-o", "show")
	if err != nil {
		return explain(err, "reading iSCSI interface "+d.Like, netip.AddrPort{}, n.Patience)
	}
	if err := save(func(s *State) { s.MadeInterface = true }); err != nil {
		return err
	}
	if _, err := n.admin(ctx, "-m", "iface", "-I", d.Interface, "-o", "new"); err != nil {
		return explain(err, "making iSCSI interface "+d.Interface, netip.AddrPort{}, n.Patience)
	}
	for line := range strings.Lines(string(like)) {
		name, v, _ := strings.Cut(strings.TrimSpace(line), " = ")
		if !strings.HasPrefix(name, "iface.") || name == "iface.iscsi_ifacename" || name == "iface.initiatorname" || v == "" || v == "<empty>" || v == "0" ||
			name == "iface.transport_name" && v == "tcp" {
			continue
		}
		if _, err := n.admin(ctx, "-m", "iface", "-I", d.Interface, "-o", "update", "-n", name, "-v", v); err != nil {
			return explain(err, "setting "+name+" of iSCSI interface "+d.Interface, netip.AddrPort{}, n.Patience)
		}
	}
	if _, err := n.admin(ctx, "-m", "iface", "-I", d.Interface, "-o", "update", "-n", "iface.initiatorname", "-v", d.Initiator); err != nil {
		return explain(err, "setting the initiator name of iSCSI interface "+d.Interface, netip.AddrPort{}, n.Patience)
	}
	return nil
}

// value is that of a line "name = value".
func value(record []byte, name string) string {
	for line := range strings.Lines(string(record)) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " = "); ok && k == name {
			return v
		}
	}
	return ""
}

// connect sees to sessions with all portals, and says of each why there is none.
func (n Node) connect(ctx context.Context, d Disk, l Login, save func(func(*State)) error) []error {
	errs := make([]error, len(d.Portals))
	var known []offer
	var g sync.WaitGroup
	for i, p := range d.Portals {
		one := d
		one.Portals = []netip.AddrPort{p}
		have, err := n.sessions(one)
		if err != nil || len(have) > 0 {
			if errs[i] = err; err == nil && !have[0].Up {
				errs[i] = fmt.Errorf("the session with portal %s is down (%s): the kernel goes on trying to reach it", p, have[0].State)
			}
			continue
		}
		// A portal tells of the others of its target. It is asked alone: a second question ends the first one, since both are
		// of one initiator.
		at := slices.IndexFunc(known, func(o offer) bool { return sameName(o.target, d.Target) && o.portal == p })
		var as offer
		if at >= 0 {
			as = known[at]
		} else {
			told, err := n.discover(ctx, d, p, l.Discovery)
			if err == nil {
				as, err = offered(told, d.Target, p)
			}
			if err != nil {
				errs[i] = err
				continue
			}
			known = append(known, told...)
		}
		g.Go(func() { errs[i] = n.login(ctx, d, p, as, l.Session, save) })
	}
	g.Wait()
	return errs
}

// discoverTries is how often a portal is asked that ends the connection, as one does that the node has asked for another volume
// meanwhile.
const discoverTries = 4

// discover asks a portal which targets there are. It leaves nothing in iscsiadm's records.
func (n Node) discover(ctx context.Context, d Disk, p netip.AddrPort, c Credentials) (all []offer, err error) {
	what := "asking portal " + p.String() + " for its targets"
	var told []byte
	for range discoverTries {
		if c.User == "" {
			told, err = n.admin(ctx, "-m", "discovery", "-t", "sendtargets", "-p", p.String(), "-I", d.Interface, "-o", "nonpersistent")
		} else {
			told, err = n.discoverBy(ctx, d, p, c)
		}
		if code(err) != codeUnanswered || !strings.Contains(err.Error(), "Connection to Discovery Address") {
			break
		}
	}
	if code(err) == codeNothingFound {
		err = nil // it has none for this initiator
	}
	if err != nil {
		return nil, explain(err, what, p, n.Patience)
	}
	return offers(told), nil
}

// offered is as what a portal offers a target, or says what it offers instead.
func offered(all []offer, target string, p netip.AddrPort) (offer, error) {
	if o, ok := offerOf(all, target, p); ok {
		return o, nil
	}
	var names []string
	for _, o := range all {
		if !slices.Contains(names, o.target) && len(names) < 5 {
			names = append(names, o.target)
		}
	}
	if len(names) == 0 {
		return offer{}, fmt.Errorf("portal %s has no target for this node's initiator: see its name (/etc/iscsi/initiatorname.iscsi) and whom the target lets in", p)
	}
	return offer{}, fmt.Errorf("portal %s has no such target for this node's initiator: it has %s", p, strings.Join(names, ", "))
}

// discoverBy asks with a user name and a password, which iscsiadm takes from a record alone.
func (n Node) discoverBy(ctx context.Context, d Disk, p netip.AddrPort, c Credentials) (told []byte, err error) {
	at := []string{"-m", "discoverydb", "-t", "sendtargets", "-p", p.String(), "-I", d.Interface}
	file, err := discoveryRecord(p)
	if err != nil {
		return nil, err
	}
	if file == "" {
		if _, err := n.admin(ctx, append(at, "-o", "new")...); err != nil {
			return nil, err
		}
		defer func() {
			if _, derr := n.admin(context.WithoutCancel(ctx), append(at, "-o", "delete")...); derr != nil && code(derr) != codeNothingFound {
				err = errors.Join(err, fmt.Errorf("removing the record of the question: %w", derr))
			}
		}()
		if file, err = discoveryRecord(p); err != nil || file == "" {
			return nil, errors.Join(fmt.Errorf("iscsiadm has made a record for portal %s, and it is not where such are: %s", p, strings.Join(roots, ", ")), err)
		}
	}
	if err := change(file, credentials("discovery.sendtargets.auth.", c)); err != nil {
		return nil, err
	}
	return n.admin(ctx, append(at, "--discover", "-o", "nonpersistent")...)
}

// login makes a session with a target as the portal offers it.
func (n Node) login(ctx context.Context, d Disk, p netip.AddrPort, as offer, c Credentials, save func(func(*State)) error) error {
	at := recordOf(as.target, d.Interface, p, as.group)
	file, err := nodeRecord(as.target, p, as.group, d.Interface)
	if err != nil {
		return err
	}
	made, now := file == "", PortalState{Group: as.group}
	if as.target != d.Target {
		now.Name = as.target
	}
	put := func(ps PortalState) func(*State) { return func(s *State) { s.Portals[p.String()] = ps } }
	if err := save(func(s *State) {
		was := s.Portals[p.String()]
		now.MadeRecord = made || was.MadeRecord && was.Group == now.Group && was.Name == now.Name
		now.Asked = was.Asked
		s.Portals[p.String()] = now
	}); err != nil {
		return err
	}
	if file == "" {
		if _, err := n.admin(ctx, append(at, "-o", "new")...); err != nil {
			return explain(err, "making a record of the target at portal "+p.String(), p, n.Patience)
		}
		if file, err = nodeRecord(as.target, p, as.group, d.Interface); err != nil || file == "" {
			return errors.Join(fmt.Errorf("iscsiadm has made a record of target %s, and it is not where such are: %s", d.Target, strings.Join(roots, ", ")), err)
		}
	}
	settings := credentials("node.session.auth.", c)
	if now.MadeRecord {
		settings = append(settings, setting{"node.startup", "manual"}, setting{"node.conn[0].startup", "manual"}, setting{"node.session.scan", "manual"},
			setting{"node.session.initial_login_retry_max", strconv.Itoa(loginTries)}, setting{"node.conn[0].timeo.login_timeout", strconv.Itoa(loginSeconds)})
	}
	if err := change(file, settings); err != nil {
		return fmt.Errorf("how this node logs in to target %s: %w", d.Target, err)
	}
	asked := time.Now()
	now.Asked = &asked
	if err := save(put(now)); err != nil {
		return err
	}
	now.Asked = nil
	_, err = n.admin(ctx, append(at, "--login")...)
	if code(err) == codeExists {
		err = nil
	}
	if err == nil {
		return save(put(now))
	}
	if code(err) == codeFatalLogin && c.UserIn != "" {
		err = fmt.Errorf("authentication failed: the target may not have proven itself by username_in and password_in of the volume's secret: %w", err)
	}
	err = explain(err, "logging in at portal "+p.String(), p, n.Patience)
	if ctx.Err() != nil || isDeadline(err) {
		return err // iscsid may be about it still
	}
	err = errors.Join(err, n.forget(ctx, d.Target, d.Interface, p, now))
	return errors.Join(err, save(func(s *State) { delete(s.Portals, p.String()) }))
}

func recordOf(target, iface string, p netip.AddrPort, group int) []string {
	return []string{"-m", "node", "-T", target, "-p", p.String() + "," + strconv.Itoa(group), "-I", iface}
}

// forget removes the record of a target at a portal, if it was made for a volume.
func (n Node) forget(ctx context.Context, target, iface string, p netip.AddrPort, was PortalState) error {
	if !was.MadeRecord {
		return nil
	}
	_, err := n.admin(context.WithoutCancel(ctx), append(recordOf(cmp.Or(was.Name, target), iface, p, was.Group), "-o", "delete")...)
	if err != nil && code(err) != codeNothingFound {
		return explain(err, "removing the record of target "+target, p, n.Patience)
	}
	return nil
}

// remove is what a file says no more, which may be gone.
func remove(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
