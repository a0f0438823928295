package lab

import (
	"fmt"
	"hash/crc32"
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

func rootOf(name string) (string, error) {
	const one = "keelson-lab"
	switch {
	case name == "":
		return one, nil
	case !named.MatchString(name):
		return one, fmt.Errorf("lab: $%s is %q: want at most 20 small letters, digits and hyphens, as in %s=second", NameEnv, name, NameEnv)
	}
	return one + "@" + name, nil
}

// Listen is the address on the machine that leads to the lab's API where no other is asked for: port 6443 of loopback for the one
// lab, and one from 16443 to 17442 by the name for another.
func Listen() string {
	if name := os.Getenv(NameEnv); name != "" {
		return fmt.Sprintf("127.0.0.1:%d", 16443+crc32.ChecksumIEEE([]byte(name))%1000)
	}
	return "127.0.0.1:6443"
}

// CgroupRoot is the cgroup of all hosts.
func CgroupRoot() string { return "/" + root }

// Root is what names of the lab's files begin with.
func Root() string { return root }

var (
	stateRoot = filepath.Join("/var/lib", root)
	runRoot   = filepath.Join("/run", root)
)
