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

// NameEnv is the environment variable that contains the name of the lab on which all functions of
// this package operate. If it is not set, they operate on the lab without a name. A machine can
// have several labs, each with its own hosts, bridges, cgroups, disks, and API address.
const NameEnv = "KEELSON_LAB"

// root is the prefix of the names of the lab's cgroup, folders, and namespaces. It is RootPrefix
// for the lab without a name. Otherwise it is RootPrefix, "@", and the name of the lab. errName is
// the error if NameEnv contains an invalid name.
var root, errName = rootOf(os.Getenv(NameEnv))

var labName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,19}$`)

// RootPrefix is the result of Root for the lab without a name. For all other labs, Root starts with
// it.
const RootPrefix = "keelson-lab"

func rootOf(name string) (string, error) {
	switch {
	case name == "":
		return RootPrefix, nil
	case !labName.MatchString(name):
		return RootPrefix,
			fmt.Errorf("lab: $%s is %q: want at most 20 small letters, digits and hyphens, as in %s=second",
				NameEnv, name, NameEnv)
	}
	return RootPrefix + "@" + name, nil
}

// Listen returns the preferred API address of the lab that NameEnv selects. It is 127.0.0.1:6443
// for the lab without a name. Otherwise it has a port from 16443 to 17442, derived from the name.
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

// labAddress returns the n-th API address for labs with a name. The ports wrap around: after the
// last address, it continues with the first.
func labAddress(n int) string { return fmt.Sprintf("127.0.0.1:%d", firstNamedPort+n%namedPorts) }

// FreeListen returns an API address for a new lab. For the lab without a name, this is always
// 127.0.0.1:6443, even if it is in use. For a lab with a name, it is the result of Listen or the
// next free address. An address is free if no process listens on it and no other lab of this
// machine, running or not, has it.
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

// CgroupRoot returns the path of the cgroup that contains the cgroups of all hosts of the lab.
func CgroupRoot() string { return "/" + root }

// Root returns the prefix of the names of the lab's cgroup, folders, and namespaces on this
// machine, such as keelson-lab.
func Root() string { return root }

var (
	stateRoot = filepath.Join("/var/lib", root)
	runRoot   = filepath.Join("/run", root)
)
