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

// NameEnv is the environment variable that says which lab of a machine is meant, where it has several: each has
// hosts, a bridge, cgroups and disks of its own, and an address of its own that leads to it. Without it there is the one.
const NameEnv = "KEELSON_LAB"

// root is what everything of the lab on this machine begins with. No lab's root is the beginning of another's.
var root, errName = rootOf(os.Getenv(NameEnv))

var named = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,19}$`)

// RootPrefix is the root of the lab without a name, and the beginning of the roots of all other labs.
const RootPrefix = "keelson-lab"

func rootOf(name string) (string, error) {
	switch {
	case name == "":
		return RootPrefix, nil
	case !named.MatchString(name):
		return RootPrefix, fmt.Errorf("lab: $%s is %q: want at most 20 small letters, digits and hyphens, as in %s=second", NameEnv, name, NameEnv)
	}
	return RootPrefix + "@" + name, nil
}

// Listen returns the preferred address for the API of the lab that $KEELSON_LAB names: 127.0.0.1:6443 for the lab without
// a name, and a port from 16443 to 17442 that follows from the name for every other lab.
func Listen() string { return listenOf(os.Getenv(NameEnv)) }

const (
	firstNamedPort = 16443
	namedPorts     = 1000 // number of ports for labs with a name
)

func listenOf(name string) string {
	if name == "" {
		return "127.0.0.1:6443"
	}
	return loopback(int(crc32.ChecksumIEEE([]byte(name)) % namedPorts))
}

// loopback returns the n-th address for labs with a name. After the last address the first one follows.
func loopback(n int) string { return fmt.Sprintf("127.0.0.1:%d", firstNamedPort+n%namedPorts) }

// FreeListen returns the address at which a new lab serves its API when the user names none. The lab without a name always
// has 127.0.0.1:6443. A lab with a name has its preferred address, or the next one on which no process listens and that
// no other lab of this machine has, running or down.
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
		address := loopback(first + i)
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

// CgroupRoot is the cgroup of all hosts.
func CgroupRoot() string { return "/" + root }

// Root is what names of the lab's files begin with.
func Root() string { return root }

var (
	stateRoot = filepath.Join("/var/lib", root)
	runRoot   = filepath.Join("/run", root)
)
