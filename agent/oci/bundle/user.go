package bundle

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Resolve returns the numeric user and groups of u, from the image's "etc/passwd" and "etc/group".
// open opens these files; a missing file counts as empty.
func (u User) Resolve(open func(name string) (io.ReadCloser, error)) (ResolvedUser, error) {
	users, err := readTable(open, "etc/passwd")
	if err != nil {
		return ResolvedUser{}, err
	}
	groups, err := readTable(open, "etc/group")
	if err != nil {
		return ResolvedUser{}, err
	}
	name, group := u.requestedNames()
	uid, gid, login, err := findUser(users, name)
	if err != nil {
		return ResolvedUser{}, err
	}
	if group != "" {
		if gid, err = findGroup(groups, group); err != nil {
			return ResolvedUser{}, err
		}
	}
	a := ResolvedUser{UID: uid, GID: gid, Groups: []uint32{gid}}
	if !u.Strict && login != "" {
		for _, g := range groups {
			if len(g) > 3 && slices.Contains(strings.Split(g[3], ","), login) {
				if n, err := parseID(g[2]); err == nil {
					a.Groups = append(a.Groups, n)
				}
			}
		}
	}
	for _, g := range u.Groups {
		if g < 0 || g > math.MaxUint32 {
			return ResolvedUser{}, fmt.Errorf("supplemental group %d is out of range", g)
		}
		a.Groups = append(a.Groups, uint32(g))
	}
	slices.Sort(a.Groups)
	a.Groups = slices.Compact(a.Groups)
	return a, nil
}

// requestedNames returns the user and group to look up, by precedence. The image's group applies
// only with the image's user.
func (u User) requestedNames() (user, group string) {
	switch {
	case u.ID != nil:
		user = strconv.FormatInt(*u.ID, 10)
	case u.Name != "":
		user = u.Name
	default:
		user, group, _ = strings.Cut(u.Image, ":")
	}
	if u.Group != nil {
		group = strconv.FormatInt(*u.Group, 10)
	}
	if user == "" {
		user = "0"
	}
	return user, group
}

// findUser looks up a user by name, then by number. It returns the user's ID, primary group ID and
// login name. For a number that is not in /etc/passwd, gid is 0 and login is "".
func findUser(users [][]string, name string) (uid, gid uint32, login string, err error) {
	n, numErr := parseID(name)
	for _, byName := range []bool{true, false} {
		for _, u := range users {
			if len(u) < 4 {
				continue
			}
			id, err := parseID(u[2])
			if err != nil || (byName && u[0] != name) || (!byName && (numErr != nil || id != n)) {
				continue
			}
			g, err := parseID(u[3])
			if err != nil {
				return 0, 0, "", fmt.Errorf("user %s in the image's /etc/passwd has group %q: %w", name, u[3], err)
			}
			return id, g, u[0], nil
		}
	}
	if numErr != nil {
		return 0, 0, "", fmt.Errorf("user %q is not in the image's /etc/passwd", name)
	}
	return n, 0, "", nil
}

func findGroup(groups [][]string, name string) (uint32, error) {
	for _, g := range groups {
		if len(g) > 2 && g[0] == name {
			return parseID(g[2])
		}
	}
	n, err := parseID(name)
	if err != nil {
		return 0, fmt.Errorf("group %q is not in the image's /etc/group", name)
	}
	return n, nil
}

func parseID(text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 31)
	return uint32(n), err
}

// readTable parses a file of colon-separated lines. It returns nil if the file does not exist.
func readTable(open func(string) (io.ReadCloser, error), name string) ([][]string, error) {
	f, err := open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the image's /%s: %w", name, err)
	}
	defer f.Close()
	var rows [][]string
	lines := bufio.NewScanner(io.LimitReader(f, 1<<20))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line != "" && line[0] != '#' {
			rows = append(rows, strings.Split(line, ":"))
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read the image's /%s: %w", name, err)
	}
	return rows, nil
}
