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
)

// iscsiadm takes the value of a setting as an argument alone, and arguments are seen by every process of the node. So its
// records, which are lines "name = value" in files that only root reads, are written here.

// setting is a line of a record.
type setting struct{ name, value string }

// edit gives settings to a record: each takes the place of the line that says something else of it, and stands before the
// record's end where none does.
func edit(record []byte, settings []setting) ([]byte, error) {
	lines := strings.Split(strings.TrimRight(string(record), "\n"), "\n")
	end := slices.Index(lines, "# END RECORD")
	if end < 0 || !strings.HasPrefix(lines[0], "# BEGIN RECORD") {
		return nil, errors.New("it is no record of iscsiadm's")
	}
	for _, s := range settings {
		if strings.ContainsAny(s.value, "\n\r\x00") || s.value != strings.TrimSpace(s.value) || s.value == "" {
			return nil, fmt.Errorf("a value for %s is empty, begins or ends with a space, or has more than one line, which iscsiadm does not take", s.name)
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

// credentials are the settings of what is proven, below a prefix.
func credentials(prefix string, c Credentials) []setting {
	if c.User == "" {
		return nil
	}
	s := []setting{{prefix + "authmethod", "CHAP"}, {prefix + "username", c.User}, {prefix + "password", c.Password}}
	if c.UserIn != "" {
		s = append(s, setting{prefix + "username_in", c.UserIn}, setting{prefix + "password_in", c.PasswordIn})
	}
	return s
}

// roots are where releases of open-iscsi have their records.
var roots = []string{"/etc/iscsi", "/var/lib/iscsi"}

// nodeRecord finds the record of a target at a portal, "" for none.
func nodeRecord(target string, portal netip.AddrPort, group int, iface string) (string, error) {
	name := filepath.Join("nodes", target, fmt.Sprintf("%s,%d,%d", portal.Addr(), portal.Port(), group), iface)
	return record(name)
}

// discoveryRecord finds the record of a portal that is asked for targets.
func discoveryRecord(portal netip.AddrPort) (string, error) {
	return record(filepath.Join("send_targets", fmt.Sprintf("%s,%d", portal.Addr(), portal.Port()), "st_config"))
}

func record(name string) (string, error) {
	for _, root := range roots {
		file := filepath.Join(root, name)
		switch st, err := os.Lstat(file); {
		case err == nil && st.Mode().IsRegular():
			return file, nil
		case err == nil:
			return "", fmt.Errorf("%s is no file", file)
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR):
			return "", err
		}
	}
	return "", nil
}

// mostOfRecord bounds what is read of one.
const mostOfRecord = 64 << 10

// change gives settings to the record in a file. It is written whole or not at all, beside the folder of records, since
// iscsiadm takes every file in that for a record.
func change(file string, settings []setting) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	was, err := io.ReadAll(io.LimitReader(f, mostOfRecord))
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	now, err := edit(was, settings)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if bytes.Equal(was, now) {
		return nil
	}
	root := file
	for !slices.Contains(roots, root) && root != filepath.Dir(root) {
		root = filepath.Dir(root)
	}
	tmp, err := os.CreateTemp(root, ".keelson-*") // mode 0600
	if err != nil {
		return err
	}
	_, err = tmp.Write(now)
	if err = errors.Join(err, tmp.Sync(), tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), file)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp.Name()))
	}
	return nil
}

// offer is a target that a portal names.
type offer struct {
	portal netip.AddrPort
	group  int // of portals
	target string
}

// offers reads what discovery tells: "ADDRESS:PORT,GROUP TARGET" lines.
func offers(told []byte) []offer {
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

// offerOf is how a target is to be logged in to, its name and the group of portals: what is told of the portal, or of another one of
// its where the portal tells of others only, as behind a translated address.
func offerOf(all []offer, target string, portal netip.AddrPort) (found offer, ok bool) {
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
