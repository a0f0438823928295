package iscsi

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Kernel reads iSCSI sessions and their devices from the kernel. Sys and Dev are the paths of /sys
// and /dev, which tests replace.
type Kernel struct{ Sys, Dev string }

// Session is an iSCSI session of the kernel's initiator with a target.
type Session struct {
	Name      string // name of the folder in sysfs, such as session7
	Target    string
	Portal    netip.AddrPort
	Interface string
	Up        bool
	State     string // state as named by the kernel
	host      string // SCSI host number
	id        string // number of the target on the host
	device    string // folder in sysfs that contains the devices of the session
}

// Sessions returns all iSCSI sessions of the kernel's initiator. The result is empty if the kernel
// has no initiator.
func (k Kernel) Sessions() ([]Session, error) {
	class := filepath.Join(k.Sys, "class", "iscsi_session")
	entries, err := os.ReadDir(class)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing the kernel's iSCSI sessions: %w", err)
	}
	var all []Session
	for _, e := range entries {
		s, err := k.readSession(filepath.Join(class, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // the session ended meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("the kernel's iSCSI %s: %w", e.Name(), err)
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b Session) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

func (k Kernel) readSession(dir string) (s Session, err error) {
	s.Name = filepath.Base(dir)
	for file, to := range map[string]*string{"targetname": &s.Target, "ifacename": &s.Interface, "state": &s.State,
		"target_id": &s.id} {
		if *to, err = attributeValue(dir, file); err != nil {
			return s, err
		}
	}
	s.Up = s.State == "LOGGED_IN"
	if s.device, err = filepath.EvalSymlinks(filepath.Join(dir, "device")); err != nil {
		return s, err
	}
	s.host = strings.TrimPrefix(filepath.Base(filepath.Dir(s.device)), "host")
	if _, err := strconv.Atoi(s.host); err != nil {
		return s, fmt.Errorf("%s is below no SCSI host", s.device)
	}
	conn := filepath.Join(k.Sys, "class", "iscsi_connection", "connection"+strings.TrimPrefix(s.Name, "session")+":0")
	addr, err := attributeValue(conn, "persistent_address")
	if err != nil {
		return s, err
	}
	port, err := attributeValue(conn, "persistent_port")
	if err != nil {
		return s, err
	}
	if s.Portal, err = ParsePortal(joinHostPort(addr, port)); err != nil {
		s.Portal = netip.AddrPort{} // a portal with a host name, which this package never creates
	}
	return s, nil
}

func joinHostPort(addr, port string) string {
	if strings.Contains(addr, ":") {
		return "[" + addr + "]:" + port
	}
	return addr + ":" + port
}

// attributeValue returns the value of the sysfs attribute name in the folder dir, or "" if the
// kernel reports an unknown value.
func attributeValue(dir, name string) (string, error) {
	f, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		return "", err
	}
	defer f.Close()
	return readOpenAttribute(f)
}

// readOpenAttribute returns the value of an open sysfs attribute. ENODEV, which the kernel returns
// for a removed object, is returned as fs.ErrNotExist.
func readOpenAttribute(f *os.File) (string, error) {
	b, err := io.ReadAll(io.LimitReader(f, 4<<10))
	if errors.Is(err, unix.ENODEV) {
		err = fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	text := strings.TrimSpace(string(b))
	if text == "(null)" || text == "<NULL>" {
		text = ""
	}
	return text, err
}

// Unit is a logical unit (a disk) that the kernel found in a session.
type Unit struct {
	LUN    int
	Block  string // such as sda; "" = no block device, or none yet
	Number string // major:minor
	WWID   string // the same in every session with the unit; "" if the target has none
	folder string
}

// Units returns the logical units that the kernel has found in a session.
func (k Kernel) Units(s Session) ([]Unit, error) {
	found, err := filepath.Glob(filepath.Join(s.device, "target*", "*:*:*:*"))
	if err != nil {
		return nil, err
	}
	var all []Unit
	for _, dir := range found {
		base := filepath.Base(dir)
		lun, err := strconv.Atoi(base[strings.LastIndexByte(base, ':')+1:])
		if err != nil {
			continue
		}
		u := Unit{LUN: lun, folder: dir}
		u.WWID, _ = attributeValue(dir, "wwid") // without a WWID, units cannot be compared
		blocks, err := os.ReadDir(filepath.Join(dir, "block"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if len(blocks) > 0 {
			u.Block = blocks[0].Name()
			if u.Number, err = attributeValue(filepath.Join(dir, "block", u.Block), "dev"); err != nil &&
				!errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
		}
		all = append(all, u)
	}
	slices.SortFunc(all, func(a, b Unit) int { return a.LUN - b.LUN })
	return all, nil
}

// blockUnit returns the logical unit with this LUN in a session. It returns false if the kernel has
// no block device for it.
func (k Kernel) blockUnit(s Session, lun int) (Unit, bool, error) {
	all, err := k.Units(s)
	for _, u := range all {
		if u.LUN != lun || u.Block == "" {
			continue
		}
		if _, err := os.Stat(filepath.Join(k.Dev, u.Block)); err == nil {
			return u, true, nil
		}
	}
	return Unit{}, false, err
}

// multipathDevice returns the name of the device that multipathd created for a logical unit, or ""
// if the logical unit has no such device.
func (k Kernel) multipathDevice(u Unit) string {
	holders, err := os.ReadDir(filepath.Join(u.folder, "block", u.Block, "holders"))
	if err != nil {
		return ""
	}
	for _, h := range holders {
		uuid, err := attributeValue(filepath.Join(k.Sys, "block", h.Name(), "dm"), "uuid")
		if err == nil && strings.HasPrefix(uuid, "mpath-") {
			return h.Name()
		}
	}
	return ""
}

// deviceNumbers returns the numbers (major:minor) of a logical unit's block device, its partitions,
// and the devices built on them.
func (k Kernel) deviceNumbers(u Unit) []string {
	dir := filepath.Join(u.folder, "block", u.Block)
	var all []string
	for _, pattern := range []string{"dev", u.Block + "*/dev", "holders/*/dev", u.Block + "*/holders/*/dev"} {
		files, _ := filepath.Glob(filepath.Join(dir, pattern)) // the pattern is valid
		for _, f := range files {
			if n, err := attributeValue(filepath.Dir(f), "dev"); err == nil && n != "" {
				all = append(all, n)
			}
		}
	}
	return all
}
