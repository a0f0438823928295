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

// Node attaches and detaches iSCSI disks on this node. The zero value is ready to use.
type Node struct {
	Patience time.Duration // limit of each step for a portal that does not respond; 0 = 30 s
	Kernel   Kernel        // zero: /sys and /dev
	Log      *slog.Logger  // may be nil
}

func (n Node) withDefaults() Node {
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

// loginTries and loginSeconds bound a login in iscsid, in attempts and seconds per attempt. iscsid
// continues a login even if the caller no longer waits.
const (
	loginTries   = 1
	loginSeconds = 15
	loginPending = (loginTries*loginSeconds + 5) * time.Second
)

// runIscsiadm runs iscsiadm for at most n.Patience.
func (n Node) runIscsiadm(ctx context.Context, args ...string) ([]byte, error) {
	path, err := exec.LookPath("iscsiadm")
	if err != nil {
		return nil,
			fmt.Errorf("iscsiadm is not on this node: install open-iscsi (iscsi-initiator-utils), and have iscsid "+
				"run: %w", exec.ErrNotFound)
	}
	ctx, cancel := context.WithTimeout(ctx, n.Patience)
	defer cancel()
	out, err := remote.Run(ctx, exec.Command(path, args...), "iscsiadm "+strings.Join(args, " "))
	var failed *remote.ExitError
	if errors.As(err, &failed) {
		failed.Output = shortenOutput(failed.Output)
	}
	return out, err
}

// shortenOutput returns the distinct lines of iscsiadm's output, joined on one line, for error
// messages.
func shortenOutput(said string) string {
	var lines []string
	for line := range strings.Lines(said) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "iscsiadm: ")
		if line != "" && !slices.Contains(lines, line) && len(lines) < 5 {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "; ")
}

// Attach attaches an iSCSI disk to the node and returns the path of its device. If the disk is
// already attached, it returns at once. dir is the folder that stores the target's State. Only one
// Attach per dir may run at a time.
func (n Node) Attach(ctx context.Context, d Disk, l Login, dir string) (device string, err error) {
	n = n.withDefaults()
	if device, err := n.Device(d); device != "" || err != nil {
		return device, err
	}
	state, err := loadState(dir)
	if err != nil {
		return "", err
	}
	state.Target, state.Interface = d.Target, d.Interface
	var mu sync.Mutex // protects state in memory and on disk
	save := func(change func(*State)) error {
		mu.Lock()
		defer mu.Unlock()
		change(&state)
		return state.saveTo(dir)
	}
	if err := n.ensureInterface(ctx, d, save); err != nil {
		return "", fmt.Errorf("%s: %w", d, err)
	}
	errs := n.connectPortals(ctx, d, l, save)
	device, found, err := n.findDevice(ctx, d)
	if device != "" {
		if err := errors.Join(errs...); err != nil {
			n.Log.Warn("an iSCSI disk is reachable through some of its portals only", "disk", d.String(), "error", err)
		}
		return device, nil
	}
	if !found || err == nil {
		err = errors.Join(append(errs, err)...)
	}
	return "", fmt.Errorf("%s: %w", d, err)
}

// Device returns the path of the device of an attached disk, or "" if the disk has no usable
// device.
func (n Node) Device(d Disk) (string, error) {
	n = n.withDefaults()
	all, err := n.diskSessions(d)
	if err != nil {
		return "", err
	}
	for _, s := range all {
		if u, ok, err := n.Kernel.blockUnit(s, d.LUN); err != nil {
			return "", err
		} else if ok && s.Up {
			return n.devicePath(u), nil
		}
	}
	return "", nil
}

// HasDisk reports whether the kernel has a device of the disk in any session with its target, even
// in a session that is down.
func (n Node) HasDisk(d Disk) (bool, error) {
	n = n.withDefaults()
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

// devicePath returns the path of the device for a logical unit: its multipath device, if there is
// one, and otherwise its block device.
func (n Node) devicePath(u Unit) string {
	if m := n.Kernel.multipathDevice(u); m != "" {
		return filepath.Join(n.Kernel.Dev, m)
	}
	return filepath.Join(n.Kernel.Dev, u.Block)
}

// diskSessions returns the kernel's sessions with the disk's target that use its interface, in the
// order of the disk's portals.
func (n Node) diskSessions(d Disk) ([]Session, error) {
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

// findDevice makes the kernel scan all sessions with the disk's target that are up, and returns the
// path of the disk's device. found is false if no session is up. If sessions are up but no device
// appears, it returns an error.
func (n Node) findDevice(ctx context.Context, d Disk) (device string, found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, n.Patience)
	defer cancel()
	all, err := n.diskSessions(d)
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
		for { // the kernel reports a unit a little before it creates the device
			u, ok, err := n.Kernel.blockUnit(s, d.LUN)
			if ok {
				return n.devicePath(u), true, nil
			}
			units, uerr := n.Kernel.Units(s)
			if err = errors.Join(err, uerr); err != nil {
				return "", true, err
			}
			if !slices.ContainsFunc(units, func(u Unit) bool { return u.LUN == d.LUN }) || ctx.Err() != nil {
				break
			}
			pauseStep(ctx)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return "", true, fmt.Errorf("looking for the disk: %w", err)
	}
	return "", true,
		fmt.Errorf("the target offers no LUN %d to this node's initiator: check the target's LUNs and their mapping",
			d.LUN)
}

// pollInterval is the time between two checks of the kernel's state.
const pollInterval = 50 * time.Millisecond

func pauseStep(ctx context.Context) {
	t := time.NewTimer(pollInterval)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// ensureInterface ensures that the iscsiadm interface of a disk exists. If the disk has its own
// initiator name, a missing interface is created and recorded with save. Otherwise a missing
// interface is an error.
func (n Node) ensureInterface(ctx context.Context, d Disk, save func(func(*State)) error) error {
	if d.Initiator == "" && d.Interface == DefaultInterface {
		return nil
	}
	if d.Initiator == "" {
		_, err := n.runIscsiadm(ctx, "-m", "iface", "-I", d.Interface, "-o", "show")
		return explainError(err, "reading iSCSI interface "+d.Interface+" of this node", netip.AddrPort{}, n.Patience)
	}
	told, err := n.runIscsiadm(ctx, "-m", "iface", "-I", d.Interface, "-o", "show")
	if err == nil && sameName(settingValue(told, "iface.initiatorname"), d.Initiator) {
		return nil
	}
	if err == nil {
		if all, serr := n.Kernel.Sessions(); serr != nil || slices.ContainsFunc(all, func(s Session) bool {
			return s.Interface == d.Interface
		}) {
			return errors.Join(fmt.Errorf("interface %s has initiator name %s on this node and is in use", d.Interface,
				settingValue(told, "iface.initiatorname")), serr)
		}
	}
	like, err := n.runIscsiadm(ctx, "-m", "iface", "-I", d.Like, "-o", "show")
	if err != nil {
		return explainError(err, "reading iSCSI interface "+d.Like, netip.AddrPort{}, n.Patience)
	}
	if err := save(func(s *State) { s.MadeInterface = true }); err != nil {
		return err
	}
	if _, err := n.runIscsiadm(ctx, "-m", "iface", "-I", d.Interface, "-o", "new"); err != nil {
		return explainError(err, "creating iSCSI interface "+d.Interface, netip.AddrPort{}, n.Patience)
	}
	for line := range strings.Lines(string(like)) {
		name, v, _ := strings.Cut(strings.TrimSpace(line), " = ")
		if !strings.HasPrefix(name, "iface.") || name == "iface.iscsi_ifacename" || name == "iface.initiatorname" ||
			v == "" || v == "<empty>" || v == "0" ||
			name == "iface.transport_name" && v == "tcp" {
			continue
		}
		if _, err := n.runIscsiadm(ctx, "-m", "iface", "-I", d.Interface, "-o", "update", "-n", name, "-v", v); err !=
			nil {
			return explainError(err, "setting "+name+" of iSCSI interface "+d.Interface, netip.AddrPort{}, n.Patience)
		}
	}
	if _, err := n.runIscsiadm(ctx, "-m", "iface", "-I", d.Interface, "-o", "update", "-n", "iface.initiatorname", "-v",
		d.Initiator); err != nil {
		return explainError(err, "setting the initiator name of iSCSI interface "+d.Interface,
			netip.AddrPort{}, n.Patience)
	}
	return nil
}

// settingValue returns the value of the setting name in an iscsiadm record, which has lines "name =
// value".
func settingValue(record []byte, name string) string {
	for line := range strings.Lines(string(record)) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " = "); ok && k == name {
			return v
		}
	}
	return ""
}

// connectPortals creates sessions with the disk's target at all its portals. It returns one error
// per portal, which is nil for a portal with a session. save records each step in State on disk.
func (n Node) connectPortals(ctx context.Context, d Disk, l Login, save func(func(*State)) error) []error {
	errs := make([]error, len(d.Portals))
	var known []offer
	var g sync.WaitGroup
	for i, p := range d.Portals {
		one := d
		one.Portals = []netip.AddrPort{p}
		have, err := n.diskSessions(one)
		if err != nil || len(have) > 0 {
			if errs[i] = err; err == nil && !have[0].Up {
				errs[i] = fmt.Errorf("the session with portal %s is down (%s): the kernel goes on trying to reach it",
					p, have[0].State)
			}
			continue
		}
		// A discovery usually reports all portals of the target. Discoveries run one at a time: a
		// second one would end the first, because both have the same initiator.
		at := slices.IndexFunc(known, func(o offer) bool { return sameName(o.target, d.Target) && o.portal == p })
		var as offer
		if at >= 0 {
			as = known[at]
		} else {
			told, err := n.discoverTargets(ctx, d, p, l.Discovery)
			if err == nil {
				as, err = selectOffer(told, d.Target, p)
			}
			if err != nil {
				errs[i] = err
				continue
			}
			known = append(known, told...)
		}
		g.Go(func() { errs[i] = n.loginPortal(ctx, d, p, as, l.Session, save) })
	}
	g.Wait()
	return errs
}

// discoverTries is how often a discovery is attempted if the portal closes the connection. A portal
// does that when the node starts a discovery for another volume.
const discoverTries = 4

// discoverTargets returns the targets that the portal p offers. It leaves no new records in
// iscsiadm's database.
func (n Node) discoverTargets(ctx context.Context, d Disk, p netip.AddrPort, c Credentials) (all []offer, err error) {
	what := "discovering targets of portal " + p.String() + ""
	var told []byte
	for range discoverTries {
		if c.User == "" {
			told, err = n.runIscsiadm(ctx, "-m", "discovery", "-t", "sendtargets", "-p", p.String(), "-I", d.Interface,
				"-o", "nonpersistent")
		} else {
			told, err = n.discoverWithCHAP(ctx, d, p, c)
		}
		if exitStatus(err) != codeUnanswered || !strings.Contains(err.Error(), "Connection to Discovery Address") {
			break
		}
	}
	if exitStatus(err) == codeNothingFound {
		err = nil // the portal has no target for this initiator
	}
	if err != nil {
		return nil, explainError(err, what, p, n.Patience)
	}
	return parseOffers(told), nil
}

// selectOffer returns the offer of the target from all, the offers of the portal p. If the target
// is missing, the error lists the targets that the portal offers.
func selectOffer(all []offer, target string, p netip.AddrPort) (offer, error) {
	if o, ok := findOffer(all, target, p); ok {
		return o, nil
	}
	var names []string
	for _, o := range all {
		if !slices.Contains(names, o.target) && len(names) < 5 {
			names = append(names, o.target)
		}
	}
	if len(names) == 0 {
		return offer{},
			fmt.Errorf("portal %s offers no target to this node's initiator: check the initiator name "+
				"(/etc/iscsi/initiatorname.iscsi) and the target's access list", p)
	}
	return offer{}, fmt.Errorf("portal %s does not offer this target to this node's initiator: it offers %s", p,
		strings.Join(names, ", "))
}

// discoverWithCHAP runs a discovery at the portal p with a user name and a password, and returns
// iscsiadm's output. iscsiadm reads such credentials only from a discovery record. If the portal
// has no record, one is created and removed afterwards.
func (n Node) discoverWithCHAP(ctx context.Context, d Disk, p netip.AddrPort, c Credentials) (told []byte, err error) {
	at := []string{"-m", "discoverydb", "-t", "sendtargets", "-p", p.String(), "-I", d.Interface}
	file, err := discoveryRecord(p)
	if err != nil {
		return nil, err
	}
	if file == "" {
		if _, err := n.runIscsiadm(ctx, append(at, "-o", "new")...); err != nil {
			return nil, err
		}
		defer func() {
			if _, derr := n.runIscsiadm(context.WithoutCancel(ctx), append(at, "-o", "delete")...); derr != nil &&
				exitStatus(derr) != codeNothingFound {
				err = errors.Join(err, fmt.Errorf("removing the discovery record: %w", derr))
			}
		}()
		if file, err = discoveryRecord(p); err != nil || file == "" {
			return nil,
				errors.Join(fmt.Errorf("iscsiadm has made a record for portal %s, but it is in none of the known "+
					"folders: %s", p, strings.Join(recordRoots, ", ")), err)
		}
	}
	if err := changeRecord(file, chapSettings("discovery.sendtargets.auth.", c)); err != nil {
		return nil, err
	}
	return n.runIscsiadm(ctx, append(at, "--discover", "-o", "nonpersistent")...)
}

// loginPortal creates a session with the disk's target at the portal p. save records the login in
// State before it starts. A login that succeeded or certainly failed is no longer recorded as
// pending. A login that iscsid may still complete stays recorded.
func (n Node) loginPortal(
	ctx context.Context, d Disk, p netip.AddrPort, as offer, c Credentials, save func(func(*State)) error,
) error {
	at := recordArgs(as.target, d.Interface, p, as.group)
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
		if _, err := n.runIscsiadm(ctx, append(at, "-o", "new")...); err != nil {
			return explainError(err, "creating the record of the target at portal "+p.String(), p, n.Patience)
		}
		if file, err = nodeRecord(as.target, p, as.group, d.Interface); err != nil || file == "" {
			return errors.Join(fmt.Errorf("iscsiadm has made a record of target %s, but it is in none of the known "+
				"folders: %s", d.Target, strings.Join(recordRoots, ", ")), err)
		}
	}
	settings := chapSettings("node.session.auth.", c)
	if now.MadeRecord {
		settings = append(settings, setting{"node.startup", "manual"}, setting{"node.conn[0].startup", "manual"},
			setting{"node.session.scan", "manual"},
			setting{"node.session.initial_login_retry_max", strconv.Itoa(loginTries)},
			setting{"node.conn[0].timeo.login_timeout", strconv.Itoa(loginSeconds)})
	}
	if err := changeRecord(file, settings); err != nil {
		return fmt.Errorf("setting login parameters for target %s: %w", d.Target, err)
	}
	asked := time.Now()
	now.Asked = &asked
	if err := save(put(now)); err != nil {
		return err
	}
	now.Asked = nil
	_, err = n.runIscsiadm(ctx, append(at, "--login")...)
	if exitStatus(err) == codeExists {
		err = nil
	}
	if err == nil {
		return save(put(now))
	}
	if exitStatus(err) == codeFatalLogin && c.UserIn != "" {
		err = fmt.Errorf("authentication failed: the target may not have proven itself by username_in and password_in "+
			"of the volume's secret: %w", err)
	}
	err = explainError(err, "logging in at portal "+p.String(), p, n.Patience)
	if ctx.Err() != nil || isDeadline(err) {
		return err // iscsid may still complete the login
	}
	err = errors.Join(err, n.deleteRecord(ctx, d.Target, d.Interface, p, now))
	return errors.Join(err, save(func(s *State) { delete(s.Portals, p.String()) }))
}

func recordArgs(target, iface string, p netip.AddrPort, group int) []string {
	return []string{"-m", "node", "-T", target, "-p", p.String() + "," + strconv.Itoa(group), "-I", iface}
}

// deleteRecord removes the iscsiadm record of a target at the portal p, if was states that the
// record was created for a volume.
func (n Node) deleteRecord(ctx context.Context, target, iface string, p netip.AddrPort, was PortalState) error {
	if !was.MadeRecord {
		return nil
	}
	_, err := n.runIscsiadm(context.WithoutCancel(ctx),
		append(recordArgs(cmp.Or(was.Name, target), iface, p, was.Group), "-o", "delete")...)
	if err != nil && exitStatus(err) != codeNothingFound {
		return explainError(err, "removing the record of target "+target, p, n.Patience)
	}
	return nil
}

// removeIfExists removes a file that may not exist.
func removeIfExists(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
