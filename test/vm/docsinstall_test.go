package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// unpackRelease unpacks a release on a machine and changes the shell's folder to that of
// install.sh.
func (c *vmCluster) unpackRelease(name, from string) error {
	m := c.all[name]
	tarball, err := m.runCommand("cd /root && cp " + from + "/keelson-*-linux-amd64.tar.gz . && basename " + from +
		"/keelson-*-linux-amd64.tar.gz .tar.gz")
	if err != nil {
		return err
	}
	_, err = c.runLine("install", "tar -xzf keelson-v1.0.0-linux-amd64.tar.gz && cd keelson-v1.0.0-linux-amd64", name,
		"keelson-v1.0.0-linux-amd64", tarball)
	if err == nil {
		_, err = m.runCommand("rm /root/*.tar.gz")
	}
	return err
}

const (
	thisRelease = "/opt/release"
	nextRelease = "/opt/release/next"
)

// parseToken returns the join token of a role in an output.
func parseToken(said, role string) (string, error) {
	found := regexp.MustCompile(`keelson1\.` + role + `\.\S+`).FindString(said)
	if found == "" {
		return "", fmt.Errorf("no token for a %s in %q", role, said)
	}
	return found, nil
}

// installByHand creates a cluster with the commands of docs/how-to/install-with-script.md.
func (c *vmCluster) installByHand() error {
	if err := c.forMachines(func(m *virtualMachine) error {
		return c.unpackRelease(m.name, thisRelease)
	}, "cp1", "cp2", "w1"); err != nil {
		return err
	}
	said, err := c.runLine("install",
		"sudo ./install.sh server --init --advertise-address 192.0.2.11 --init-flag=--replica-token-uses=2", "cp1")
	if err != nil {
		return err
	}
	for _, want := range []string{"cluster created.",
		"kubeconfig of the administrator:  /var/lib/keelson/controlplane/admin.kubeconfig",
		"key file of the stores and backups: /var/lib/keelson/controlplane/pki/store.keys",
		"install: starting keelson-controlplane", "install: done;"} {
		if !strings.Contains(said, want) {
			return fmt.Errorf("install.sh server --init does not say %q: %s", want, said)
		}
	}
	if err := c.runLineFor("level", "upgrade", "keelson-controlplane --version", "cp1"); err != nil {
		return err
	}
	replica, err := parseToken(said, "controlplane")
	if err != nil {
		return err
	}
	node, err := parseToken(said, "node")
	if err != nil {
		return err
	}
	if _, err := c.runLine("install", "sudo ./install.sh server --server 192.0.2.11 --token keelson1.controlplane...",
		"cp2", "keelson1.controlplane...", replica); err != nil {
		return err
	}
	if _, err := c.runLine("install", "sudo ./install.sh agent  --server 192.0.2.11 --token keelson1.node...", "w1",
		"keelson1.node...", node); err != nil {
		return err
	}
	kubeconfig, err := c.all["cp1"].runCommand("cat /var/lib/keelson/controlplane/admin.kubeconfig")
	if err != nil {
		return err
	}
	at := filepath.Join(c.site.dir, c.site.kubeconfig)
	if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o700), os.WriteFile(at, []byte(kubeconfig), 0o600)); err !=
		nil {
		return err
	}
	if err := c.awaitMembers("cp1", "cp2"); err != nil {
		return err
	}
	return c.awaitNode()
}

// awaitNode waits until the worker is Ready.
func (c *vmCluster) awaitNode() error {
	return c.awaitOutput("True", "get", "node", "w1", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
}

// three is a file without a standby.
var three = []string{"cp1 controlplane", "cp2 controlplane", "cp3 controlplane", "w1 worker"}

// adoptCluster runs "kctl cluster up" on the cluster that was created by hand: it recognizes the
// existing parts and adds the missing ones.
func (c *vmCluster) adoptCluster() error {
	if err := c.writeRoles(three...); err != nil {
		return err
	}
	out, err := c.runLine("install", "kctl cluster up -f cluster.yaml --dry-run", "site")
	if err != nil {
		return err
	}
	if !regexp.MustCompile(`cp3 +join as a replica`).MatchString(out) || strings.Contains(out, "make the cluster") {
		return fmt.Errorf("the output of the dry run is %s", out)
	}
	if s, err := c.clusterStatus(); err != nil || len(s.Members) != 2 {
		return fmt.Errorf("a dry run changed the members: %+v (%w)", s.Members, err)
	}
	if err := c.runLineFor("replica cp3 is ready", "install", "kctl cluster up -f cluster.yaml", "site"); err != nil {
		return err
	}
	if err := c.awaitMembers("cp1", "cp2", "cp3"); err != nil {
		return err
	}
	if err := c.runLineFor("nothing to do: all is as cluster.yaml and release", "install",
		"kctl cluster up -f cluster.yaml", "site"); err != nil {
		return err
	}
	return c.awaitSharedAddress()
}

// addStandby adds a replica without a vote and changes no other machine.
func (c *vmCluster) addStandby() error {
	if err := c.writeRoles(append(three[:3:3], "cp4 standby", "w1 worker")...); err != nil {
		return err
	}
	if err := c.runLineFor("standby cp4 is ready", "install", "kctl cluster add -f cluster.yaml", "site"); err != nil {
		return err
	}
	if err := c.awaitMembers("cp1", "cp2", "cp3", "cp4"); err != nil {
		return err
	}
	return awaitCondition(func() error {
		s, err := c.clusterStatus()
		if err != nil {
			return err
		}
		if m := memberStatus(s, "cp4"); m.Voter || !m.Standby || s.Autopilot == nil || s.Autopilot.After != 300_000 {
			return fmt.Errorf("the standby is %+v, and the autopilot %+v", m, s.Autopilot)
		}
		return nil
	})
}
