package iscsi

import (
	"bytes"
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

	"keelson.dev/keelson/internal/durable"
)

// iscsiadm accepts the value of a setting only as an argument, and every process of the node can
// read arguments. Passwords are therefore written directly to iscsiadm's records. A record is a
// file of lines "name = value" that only root can read.

// setting is a line "name = value" of an iscsiadm record.
type setting struct{ name, value string }

// editRecord returns the iscsiadm record with the settings changed. A setting replaces the line
// with the same name, or is inserted before the record's end.
func editRecord(record []byte, settings []setting) ([]byte, error) {
	lines := strings.Split(strings.TrimRight(string(record), "\n"), "\n")
	end := slices.Index(lines, "# END RECORD")
	if end < 0 || !strings.HasPrefix(lines[0], "# BEGIN RECORD") {
		return nil, errors.New("it is not a record of iscsiadm")
	}
	for _, s := range settings {
		if strings.ContainsAny(s.value, "\n\r\x00") || s.value != strings.TrimSpace(s.value) || s.value == "" {
			return nil,
				fmt.Errorf("a value for %s is empty, starts or ends with a space, or has more than one line, which "+
					"iscsiadm does not accept", s.name)
		}
		at := slices.IndexFunc(lines[:end], func(l string) bool {
			name, _, _ := strings.Cut(l, "=")
			return strings.TrimSpace(name) == s.name
		})
		line := s.name + " = " + s.value
		if at >= 0 {
			lines[at] = line
			continue
		}
		lines = slices.Insert(lines, end, line)
		end++
	}
	return []byte(strings.Join(lines, "\n") + "\n"), nil
}

// chapSettings returns the settings of an iscsiadm record for CHAP credentials. prefix is the first
// part of their names.
func chapSettings(prefix string, c Credentials) []setting {
	if c.User == "" {
		return nil
	}
	s := []setting{{prefix + "authmethod", "CHAP"}, {prefix + "username", c.User}, {prefix + "password", c.Password}}
	if c.UserIn != "" {
		s = append(s, setting{prefix + "username_in", c.UserIn}, setting{prefix + "password_in", c.PasswordIn})
	}
	return s
}

// recordRoots are the folders in which the releases of open-iscsi store iscsiadm's records.
var recordRoots = []string{"/etc/iscsi", "/var/lib/iscsi"}

// nodeRecord returns the path of iscsiadm's record of a target at a portal, or "" if the record
// does not exist. group is the portal group tag.
func nodeRecord(target string, portal netip.AddrPort, group int, iface string) (string, error) {
	name := filepath.Join("nodes", target, fmt.Sprintf("%s,%d,%d", portal.Addr(), portal.Port(), group), iface)
	return findRecord(name)
}

// discoveryRecord returns the path of iscsiadm's discovery record of a portal, or "" if the record
// does not exist.
func discoveryRecord(portal netip.AddrPort) (string, error) {
	return findRecord(filepath.Join("send_targets", fmt.Sprintf("%s,%d", portal.Addr(), portal.Port()), "st_config"))
}

func findRecord(name string) (string, error) {
	for _, root := range recordRoots {
		file := filepath.Join(root, name)
		switch st, err := os.Lstat(file); {
		case err == nil && st.Mode().IsRegular():
			return file, nil
		case err == nil:
			return "", fmt.Errorf("%s is not a regular file", file)
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR):
			return "", err
		}
	}
	return "", nil
}

// maxRecordBytes is the maximum size of an iscsiadm record that is read.
const maxRecordBytes = 64 << 10

// changeRecord changes settings in the iscsiadm record file. The file is replaced atomically. The
// temporary file is outside the folder of records, because iscsiadm reads every file there as a
// record.
func changeRecord(file string, settings []setting) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	was, err := io.ReadAll(io.LimitReader(f, maxRecordBytes))
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	now, err := editRecord(was, settings)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if bytes.Equal(was, now) {
		return nil
	}
	root := file
	for !slices.Contains(recordRoots, root) && root != filepath.Dir(root) {
		root = filepath.Dir(root)
	}
	return durable.WriteWith(file, now, durable.Options{Level: durable.Intact, TempDir: root,
		TempPattern: ".keelson-*"})
}

// offer is a target that a portal reports in a discovery.
type offer struct {
	portal netip.AddrPort
	group  int // portal group tag
	target string
}

// parseOffers parses iscsiadm's output of a discovery: lines "ADDRESS:PORT,GROUP TARGET".
func parseOffers(told []byte) []offer {
	var all []offer
	for line := range strings.Lines(string(told)) {
		at, target, _ := strings.Cut(strings.TrimSpace(line), " ")
		address, tag, ok := strings.Cut(at, ",")
		if !ok {
			continue
		}
		p, err := ParsePortal(address)
		group, gerr := strconv.Atoi(tag)
		if err == nil && gerr == nil && target != "" {
			all = append(all, offer{p, group, strings.TrimSpace(target)})
		}
	}
	return all
}

// findOffer returns the offer of the target at the portal from all. If no offer has this portal, as
// behind address translation, it returns the first offer of the target. ok is false if all has no
// offer of the target.
func findOffer(all []offer, target string, portal netip.AddrPort) (found offer, ok bool) {
	for _, o := range all {
		switch {
		case !sameName(o.target, target):
		case o.portal == portal:
			return o, true
		case !ok:
			found, ok = o, true
		}
	}
	return found, ok
}
