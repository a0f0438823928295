package lab

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"net"
	"os"
	"path/filepath"
	"regexp"
)

// NameEnv is the environment variable that selects one of several labs of a machine. Each has its
// own hosts, bridge, cgroups, disks, and API address. Without it, the lab without a name is
// selected.
const NameEnv = "KEELSON_LAB"

// root is the prefix of all names of the lab on this machine. No lab's root is a prefix of
// another's.
var root, errName = rootOf(os.Getenv(NameEnv))

var labName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,19}$`)

// RootPrefix is the root of the lab without a name, and the prefix of the roots of all other labs.
const RootPrefix = "keelson-lab"

func rootOf(name string) (string, error) {
	switch {
	case name == "":
		return RootPrefix, nil
	case !labName.MatchString(name):
		return RootPrefix, fmt.Errorf("lab: $%s is %q: want at most 20 small letters, digits and hyphens, as in %s=second", NameEnv, name, NameEnv)
	}
	return RootPrefix + "@" + name, nil
}

// Listen returns the preferred API address of the lab that $KEELSON_LAB selects: 127.0.0.1:6443 for
// the lab without a name, and otherwise a port from 16443 to 17442 that depends on the name.
func Listen() string { return listenOf(os.Getenv(NameEnv)) }

const (
	firstNamedPort = 16443
	namedPorts     = 1000 // number of ports for labs with a name
)

func listenOf(name string) string {
	if name == "" {
		return "127.0.0.1:6443"
	}
	return labAddress(int(crc32.ChecksumIEEE([]byte(name)) % namedPorts))
}

// labAddress returns the n-th API address for named labs, modulo their number.
func labAddress(n int) string { return fmt.Sprintf("127.0.0.1:%d", firstNamedPort+n%namedPorts) }

// FreeListen returns the default API address of a new lab. The lab without a name always has
// 127.0.0.1:6443. A named lab has its preferred address, or the next one that no process listens on
// and that no other lab of this machine has, running or down.
func FreeListen() (string, error) { return freeListen(os.Getenv(NameEnv), "/var/lib") }

func freeListen(name, states string) (string, error) {
	preferred := listenOf(name)
	if name == "" {
		return preferred, nil
	}
	reserved := map[string]bool{}
	files, _ := filepath.Glob(filepath.Join(states, RootPrefix+"*", "lab.json"))
	for _, file := range files {
		var c Config
		if raw, err := os.ReadFile(file); err == nil && json.Unmarshal(raw, &c) == nil {
			reserved[c.Listen] = true
		}
	}
	first := int(crc32.ChecksumIEEE([]byte(name)) % namedPorts)
	for i := range namedPorts {
		address := labAddress(first + i)
		if reserved[address] {
			continue
		}
		if probe, err := net.Listen("tcp", address); err == nil {
			return address, probe.Close()
		}
	}
	return "", fmt.Errorf("lab: no port from %d to %d of 127.0.0.1 is free for lab %q: name an address with --listen",
		firstNamedPort, firstNamedPort+namedPorts-1, name)
}

// CgroupRoot returns the cgroup of all hosts.
func CgroupRoot() string { return "/" + root }

// Root returns the prefix of the names of the lab's files.
func Root() string { return root }

var (
	stateRoot = filepath.Join("/var/lib", root)
	runRoot   = filepath.Join("/run", root)
)
