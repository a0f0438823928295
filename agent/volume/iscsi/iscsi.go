// Package iscsi brings disks of iSCSI targets to the node and takes them away again. The kernel's initiator is driven by the
// node's own iscsiadm and iscsid (open-iscsi), whose records are made and removed as sessions come and go. Which sessions and
// devices there are is read from the kernel (/sys), so that no udev is needed and nothing is believed that was true once.
//
// What was begun is on disk before it is begun (State), so that whoever comes after a crash finishes it or undoes it.
// Sessions and records that were there before are used, and left.
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

// DefaultInterface is the one that binds sessions to nothing.
const DefaultInterface = "default"

// Disk is a logical unit of a target, as one initiator sees it.
type Disk struct {
	// Target is its name: iqn, eui or naa, in lower case, in which names are compared (RFC 3722): one target has one name here,
	// however volumes and portals write it.
	Target  string
	Portals []netip.AddrPort
	LUN     int
	// Interface is a record of iscsiadm's by which sessions are made. One that goes by a name of its own as Initiator is
	// made, after the pattern of Like, and belongs to the disk.
	Interface, Initiator, Like string
}

// String names the disk for messages.
func (d Disk) String() string {
	var portals []string
	for _, p := range d.Portals {
		portals = append(portals, p.String())
	}
	return fmt.Sprintf("iSCSI target %s at %s, LUN %d", d.Target, strings.Join(portals, ", "), d.LUN)
}

// Credentials are what initiator and target prove to each other (CHAP). An empty User proves nothing.
type Credentials struct {
	User, Password     string
	UserIn, PasswordIn string // the target's, to this node
}

// Login is what is proven: to be told which targets there are, and to be let in to one.
type Login struct{ Discovery, Session Credentials }

var (
	targetNames = regexp.MustCompile(`^(iqn\.[0-9]{4}-[0-9]{2}\.[[:alnum:].-]+(:[^,;*&$|/\s]+)?|eui\.[[:xdigit:]]{16}|naa\.([[:xdigit:]]{16}|[[:xdigit:]]{32}))$`)
	interfaces  = regexp.MustCompile(`^[[:alnum:]\[][[:alnum:]._:\[\]-]{0,63}$`)
)

// ParsePortal reads an address with a port, or one without whose port is the usual one.
func ParsePortal(text string) (netip.AddrPort, error) {
	if p, err := netip.ParseAddrPort(text); err == nil && p.Port() != 0 {
		return netip.AddrPortFrom(p.Addr().Unmap(), p.Port()), nil
	}
	addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(text, "["), "]"))
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("portal %q is no IP address, with or without a port", text)
	}
	return netip.AddrPortFrom(addr.Unmap(), 3260), nil
}

// sameName says that two names are of one target or initiator.
func sameName(a, b string) bool { return strings.EqualFold(a, b) }

// New makes a Disk of what a volume says. The volume's name is part of that of an interface that has an initiator of its own.
func New(volume, target, portal string, more []string, lun int32, base, initiator string) (Disk, error) {
	d := Disk{Target: strings.ToLower(target), LUN: int(lun), Interface: base}
	if !targetNames.MatchString(target) || len(target) > 223 {
		return d, fmt.Errorf("%q is no name of an iSCSI target (iqn, eui or naa)", target)
	}
	for _, text := range append([]string{portal}, more...) {
		p, err := ParsePortal(text)
		if err != nil {
			return d, err
		}
		if !contains(d.Portals, p) {
			d.Portals = append(d.Portals, p)
		}
	}
	if lun < 0 || lun > 255 {
		return d, fmt.Errorf("LUN %d is not from 0 to 255", lun)
	}
	if d.Interface == "" {
		d.Interface = DefaultInterface
	}
	if !interfaces.MatchString(d.Interface) {
		return d, fmt.Errorf("%q is no name of an iSCSI interface", d.Interface)
	}
	if initiator == "" {
		return d, nil
	}
	d.Like, d.Initiator, d.Interface = d.Interface, initiator, portal+":"+volume
	if !targetNames.MatchString(initiator) || len(initiator) > 223 {
		return d, fmt.Errorf("initiatorName %q is no name of an iSCSI initiator (iqn, eui or naa)", initiator)
	}
	if !interfaces.MatchString(d.Interface) {
		return d, fmt.Errorf("%q, of the portal and the volume's name, is no name of an iSCSI interface: it has 64 characters at most", d.Interface)
	}
	return d, nil
}

func contains(list []netip.AddrPort, p netip.AddrPort) bool {
	for _, have := range list {
		if have == p {
			return true
		}
	}
	return false
}

// Exit statuses of iscsiadm, as its manual page numbers them.
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

// code is the exit status of a program that ended badly, 0 for every other error.
func code(err error) int {
	var failed *remote.Failed
	if errors.As(err, &failed) {
		return failed.Code
	}
	return 0
}

// explain says what an error of iscsiadm means, which was asked about a portal, and what to do.
func explain(err error, what string, portal netip.AddrPort, patience time.Duration) error {
	say := func(text string, args ...any) error { return fmt.Errorf("%s (%w)", fmt.Sprintf(text, args...), err) }
	said := ""
	if err != nil {
		said = err.Error()
	}
	switch c := code(err); {
	case err == nil:
		return nil
	case c == codeAuth, strings.Contains(said, "authorization failure"), strings.Contains(said, "authentication fail"):
		return say("%s: authentication failed: see the user names and passwords (CHAP) in the volume's secret, and whether the target lets this initiator in", what)
	case c == codeNoDaemon, c == codeDaemon:
		return say("%s: iscsid does not run on this node: 'systemctl enable --now iscsid' (package open-iscsi or iscsi-initiator-utils)", what)
	case c == codeNoTransport:
		return say("%s: the kernel of this node has no iSCSI initiator: load module iscsi_tcp, which may be in a package of its own such as linux-modules-extra", what)
	case errors.Is(err, remote.ErrStuck), errors.Is(err, unix.ETIMEDOUT), isDeadline(err), c == codeTimeout:
		return say("%s: portal %s did not answer within %s: see whether it runs and whether this node reaches it; it is tried again", what, portal, patience)
	case c == codeFatalLogin:
		return say("%s: the target refused the login, and would again: see its own log", what)
	case c == codeTransport, c == codeUnanswered:
		return say("%s: this node does not reach portal %s, or nothing listens there; it is tried again", what, portal)
	}
	return fmt.Errorf("%s: %w", what, err)
}

func isDeadline(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}
