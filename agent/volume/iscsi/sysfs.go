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

// Kernel is where the kernel tells of its sessions and devices.
type Kernel struct{ Sys, Dev string }

// Session is what the kernel has with a target.
type Session struct {
	Name      string // of its folder: session7
	Target    string
	Portal    netip.AddrPort
	Interface string
	Up        bool
	State     string // in the kernel's words
	host      string // of SCSI: its number
	id        string // of the target on it
	device    string // folder, below which its devices are
}

// Sessions lists them. That there are none because the kernel has no initiator is no error.
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
		s, err := k.session(filepath.Join(class, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // it ended meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("the kernel's iSCSI %s: %w", e.Name(), err)
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b Session) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

func (k Kernel) session(dir string) (s Session, err error) {
	s.Name = filepath.Base(dir)
	for file, to := range map[string]*string{"targetname": &s.Target, "ifacename": &s.Interface, "state": &s.State, "target_id": &s.id} {
		if *to, err = attribute(dir, file); err != nil {
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
	addr, err := attribute(conn, "persistent_address")
	if err != nil {
		return s, err
	}
	port, err := attribute(conn, "persistent_port")
	if err != nil {
		return s, err
	}
	if s.Portal, err = ParsePortal(netJoin(addr, port)); err != nil {
		s.Portal = netip.AddrPort{} // by a name, as nobody asks for it here
	}
	return s, nil
}

func netJoin(addr, port string) string {
	if strings.Contains(addr, ":") {
		return "[" + addr + "]:" + port
	}
	return addr + ":" + port
}

// attribute reads one. What the kernel does not know is "".
func attribute(dir, name string) (string, error) {
	f, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		return "", err
	}
	defer f.Close()
	return content(f)
}

// content is what an attribute that is open says. Of what has gone since the kernel says ENODEV, which is told as if it could not be opened.
func content(f *os.File) (string, error) {
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

// Unit is a logical unit that the kernel has of a session.
type Unit struct {
	LUN    int
	Block  string // sda; "" where it has no block device, yet or at all
	Number string // major:minor
	WWID   string // the same by whichever session it is reached, "" where the target has none
	folder string
}

// Units lists what the kernel has found so far.
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
		u.WWID, _ = attribute(dir, "wwid") // without one nobody can compare it
		blocks, err := os.ReadDir(filepath.Join(dir, "block"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if len(blocks) > 0 {
			u.Block = blocks[0].Name()
			if u.Number, err = attribute(filepath.Join(dir, "block", u.Block), "dev"); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
		}
		all = append(all, u)
	}
	slices.SortFunc(all, func(a, b Unit) int { return a.LUN - b.LUN })
	return all, nil
}

// unit is one of those, and false for none with a block device that can be opened.
func (k Kernel) unit(s Session, lun int) (Unit, bool, error) {
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

// multipath is the device that multipathd has made of a unit and others that are the same, "" for none.
func (k Kernel) multipath(u Unit) string {
	holders, err := os.ReadDir(filepath.Join(u.folder, "block", u.Block, "holders"))
	if err != nil {
		return ""
	}
	for _, h := range holders {
		uuid, err := attribute(filepath.Join(k.Sys, "block", h.Name(), "dm"), "uuid")
		if err == nil && strings.HasPrefix(uuid, "mpath-") {
			return h.Name()
		}
	}
	return ""
}

// numbers are major:minor of what is made of a unit: itself, its partitions, what holds it.
func (k Kernel) numbers(u Unit) []string {
	dir := filepath.Join(u.folder, "block", u.Block)
	var all []string
	for _, pattern := range []string{"dev", u.Block + "*/dev", "holders/*/dev", u.Block + "*/holders/*/dev"} {
		files, _ := filepath.Glob(filepath.Join(dir, pattern)) // the pattern is well-formed
		for _, f := range files {
			if n, err := attribute(filepath.Dir(f), "dev"); err == nil && n != "" {
				all = append(all, n)
			}
		}
	}
	return all
}
