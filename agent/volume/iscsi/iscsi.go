// Package iscsi attaches disks of iSCSI targets to the node and detaches them. It controls the
// kernel's initiator through the node's iscsiadm and iscsid (open-iscsi), and creates and removes
// their records with each session. The current sessions and devices are read from the kernel
// (/sys), so udev is not needed and no stale state is used.
//
// Each step is on disk before it starts (State), so that it is completed or undone after a crash.
// Sessions and records that existed before are used, and left in place.
package iscsi

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/volume/remote"
)

// DefaultInterface is the iscsiadm interface that does not bind its sessions to a network
// interface.
const DefaultInterface = "default"

// Disk is a logical unit of a target, as seen by one initiator.
type Disk struct {
	// Target is the iqn, eui or naa name in lower case. Names are compared in lower case (RFC
	// 3722), so a target has one name here, however volumes and portals write it.
	Target  string
	Portals []netip.AddrPort
	LUN     int
	// Interface is the iscsiadm interface for the sessions. If Initiator is set, the interface is
	// created for the disk, as a copy of Like with this initiator name.
	Interface, Initiator, Like string
}

// String returns the disk's name for messages.
func (d Disk) String() string {
	var portals []string
	for _, p := range d.Portals {
		portals = append(portals, p.String())
	}
	return fmt.Sprintf("iSCSI target %s at %s, LUN %d", d.Target, strings.Join(portals, ", "), d.LUN)
}

// Credentials are CHAP credentials. An empty User means no authentication.
type Credentials struct {
	User, Password     string
	UserIn, PasswordIn string // credentials of the target, for mutual CHAP
}

// Login contains the CHAP credentials for discovery and for sessions. Its JSON form is hashed into
// records of volumes, so its field names must not change.
type Login struct{ Discovery, Session Credentials }

var (
	targetPattern = regexp.MustCompile(`^(iqn\.[0-9]{4}-[0-9]{2}\.[[:alnum:].-]+(:[^,` +
		`;*&$|/\s]+)?|eui\.[[:xdigit:]]{16}|naa\.([[:xdigit:]]{16}|[[:xdigit:]]{32}))$`)
	interfacePattern = regexp.MustCompile(`^[[:alnum:]\[][[:alnum:]._:\[\]-]{0,63}$`)
)

// ParsePortal parses the address of an iSCSI portal: an IP address with an optional port. The
// default port is 3260.
func ParsePortal(text string) (netip.AddrPort, error) {
	if p, err := netip.ParseAddrPort(text); err == nil && p.Port() != 0 {
		return netip.AddrPortFrom(p.Addr().Unmap(), p.Port()), nil
	}
	addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(text, "["), "]"))
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("portal %q is not an IP address with or without a port", text)
	}
	return netip.AddrPortFrom(addr.Unmap(), 3260), nil
}

// sameName reports whether two iSCSI names denote the same target or initiator. It ignores case.
func sameName(a, b string) bool { return strings.EqualFold(a, b) }

// New returns the Disk for the fields of a volume. base is the iscsiadm interface. If initiator is
// set, the disk gets its own interface, with a name that contains the volume's name.
func New(volume, target, portal string, more []string, lun int32, base, initiator string) (Disk, error) {
	d := Disk{Target: strings.ToLower(target), LUN: int(lun), Interface: base}
	if !targetPattern.MatchString(target) || len(target) > 223 {
		return d, fmt.Errorf("%q is not a valid name of an iSCSI target (iqn, eui or naa)", target)
	}
	for _, text := range append([]string{portal}, more...) {
		p, err := ParsePortal(text)
		if err != nil {
			return d, err
		}
		if !containsPortal(d.Portals, p) {
			d.Portals = append(d.Portals, p)
		}
	}
	if lun < 0 || lun > 255 {
		return d, fmt.Errorf("LUN %d is not from 0 to 255", lun)
	}
	if d.Interface == "" {
		d.Interface = DefaultInterface
	}
	if !interfacePattern.MatchString(d.Interface) {
		return d, fmt.Errorf("%q is not a valid name of an iSCSI interface", d.Interface)
	}
	if initiator == "" {
		return d, nil
	}
	d.Like, d.Initiator, d.Interface = d.Interface, initiator, portal+":"+volume
	if !targetPattern.MatchString(initiator) || len(initiator) > 223 {
		return d, fmt.Errorf("initiatorName %q is not a valid name of an iSCSI initiator (iqn, eui or naa)", initiator)
	}
	if !interfacePattern.MatchString(d.Interface) {
		return d,
			fmt.Errorf("%q, made from portal and volume name, is not a valid name of an iSCSI interface: the maximum "+
				"is 64 characters", d.Interface)
	}
	return d, nil
}

func containsPortal(list []netip.AddrPort, p netip.AddrPort) bool {
	for _, have := range list {
		if have == p {
			return true
		}
	}
	return false
}

// Exit statuses of iscsiadm, from its manual page.
const (
	codeNoSession    = 2
	codeTransport    = 4
	codeLogin        = 5
	codeRecords      = 6
	codeTimeout      = 8
	codeLogout       = 10
	codeUnanswered   = 11
	codeNoTransport  = 12
	codeExists       = 15
	codeDaemon       = 18
	codeFatalLogin   = 19
	codeNoDaemon     = 20
	codeNothingFound = 21
	codeAuth         = 24
)

// exitStatus returns the exit status of a failed program, or 0 if err is not an error of a program.
func exitStatus(err error) int {
	var failed *remote.ExitError
	if errors.As(err, &failed) {
		return failed.Code
	}
	return 0
}

// explainError adds the likely cause and a remedy to an error of iscsiadm. what describes the
// failed action, portal the portal that it contacted.
func explainError(err error, what string, portal netip.AddrPort, patience time.Duration) error {
	say := func(text string, args ...any) error { return fmt.Errorf("%s (%w)", fmt.Sprintf(text, args...), err) }
	said := ""
	if err != nil {
		said = err.Error()
	}
	switch c := exitStatus(err); {
	case err == nil:
		return nil
	case c == codeAuth, strings.Contains(said, "authorization failure"), strings.Contains(said, "authentication fail"):
		return say("%s: authentication failed: check the user names and passwords (CHAP) in the volume's secret, and "+
			"the target's access list for this initiator", what)
	case c == codeNoDaemon, c == codeDaemon:
		return say("%s: iscsid does not run on this node: 'systemctl enable --now iscsid' (package open-iscsi or "+
			"iscsi-initiator-utils)", what)
	case c == codeNoTransport:
		return say("%s: the kernel of this node has no iSCSI initiator: load module iscsi_tcp, which may be in a "+
			"separate package such as linux-modules-extra", what)
	case errors.Is(err, remote.ErrStuck), errors.Is(err, unix.ETIMEDOUT), isDeadline(err), c == codeTimeout:
		return say("%s: portal %s did not answer within %s: check that it runs and that this node can reach it; this "+
			"is retried", what, portal, patience)
	case c == codeFatalLogin:
		return say("%s: the target refused the login permanently: see the target's log", what)
	case c == codeTransport, c == codeUnanswered:
		return say("%s: this node does not reach portal %s, or nothing listens there; this is retried", what, portal)
	}
	return fmt.Errorf("%s: %w", what, err)
}

func isDeadline(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}
