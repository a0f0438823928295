package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// awaitRotation waits until a rotation of keys is at a step.
func (c *vmCluster) awaitRotation(kind, step string) error {
	return awaitCondition(func() error {
		return c.runLineFor("exchange of "+kind+": "+step, "secure", "kctl cluster rotate --status", "site")
	})
}

// rotateKeys aborts one rotation while a node is absent and completes another.
func (c *vmCluster) rotateKeys() error {
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	// A node that is away holds the step trust up, and is named.
	if _, err := c.all["w1"].runCommand("systemctl stop keelson-agent"); err != nil {
		return err
	}
	if _, err := c.runLine("secure", "kctl cluster rotate cluster-ca", "site"); err != nil {
		return err
	}
	if err := awaitCondition(func() error {
		return c.runLineFor("w1", "secure", "kctl cluster rotate --status", "site")
	}); err != nil {
		return err
	}
	if err := c.runLineFor("step trust", "secure", "kctl cluster rotate --status", "site"); err != nil {
		return err
	}
	if _, err := c.runLine("secure", "kctl cluster rotate --abort", "site"); err != nil {
		return err
	}
	if _, err := c.all["w1"].runCommand("systemctl start keelson-agent"); err != nil {
		return err
	}
	if err := errors.Join(c.awaitNode(), c.awaitRotation("cluster-ca", "aborted")); err != nil {
		return err
	}
	if err := c.runLineFor("service-account-key", "secure", "kctl cluster certs", "site"); err != nil {
		return err
	}
	text := "kctl cluster rotate service-account-key"
	if _, err := c.runLine("secure", text, "site", text, text+" --grace-period 0s"); err != nil {
		return err
	}
	if err := c.awaitRotation("service-account-key", "done"); err != nil {
		return err
	}
	if _, err := c.runLine("secure", "kctl cluster rotate peers-ca", "site"); err != nil {
		return err
	}
	if err := c.awaitRotation("peers-ca", "done"); err != nil {
		return err
	}
	if _, err := c.runLine("secure", "kctl cluster rotate encryption-key", "site"); err != nil {
		return err
	}
	if err := c.awaitRotation("encryption-key", "done"); err != nil {
		return err
	}
	return errors.Join(c.awaitMembers(c.replicas...), c.awaitNode(), c.checkService())
}

// rotateCA rotates the cluster CA so that the previous kubeconfig is refused, as after a leak.
func (c *vmCluster) rotateCA() error {
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	raw, err := os.ReadFile(filepath.Join(c.site.dir, c.site.kubeconfig))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(c.site.dir, "leaked"), raw, 0o600); err != nil {
		return err
	}
	if _, err := c.runLine("secure", "kctl cluster rotate cluster-ca --grace-period 0s", "site"); err != nil {
		return err
	}
	if err := awaitCondition(func() error {
		_, err := c.runLine("secure", "kctl cluster renew", "site")
		if err != nil && strings.Contains(err.Error(), "not run in time") {
			// With --grace-period 0s the rotation may be over before the next renewal: then the
			// kubeconfig of a replica is used, as the error advises.
			err = c.copyKubeconfig(c.replicas[0])
		}
		return errors.Join(err, c.runLineFor("exchange of cluster-ca: done", "secure",
			"kctl cluster rotate --status", "site"))
	}); err != nil {
		return err
	}
	if _, err := c.runLine("secure", "kctl rollout restart deployment/NAME", "site", "NAME", "hello"); err != nil {
		return err
	}
	if err := errors.Join(c.awaitMembers(c.replicas...), c.awaitNode()); err != nil {
		return err
	}
	if err := awaitCondition(func() error {
		out, err := c.runAtSite(soon, "KUBECONFIG=leaked kctl get nodes --insecure-skip-tls-verify 2>&1; true")
		if err == nil && !strings.Contains(out, "Unauthorized") && !strings.Contains(out, "must be logged in") &&
			!strings.Contains(out, "certificate") {
			err = fmt.Errorf("a previous kubeconfig can read %s", out)
		}
		return err
	}); err != nil {
		return err
	}
	return errors.Join(c.awaitSharedAddress(), c.awaitExample(), c.checkService())
}

// rotateByHand rotates the replicas' CA without "kctl cluster rotate". Replicas that were removed
// and wiped are not part of it.
func (c *vmCluster) rotateByHand() error {
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	const file = "/root/peers.pem"
	first := c.all[c.apiMachine]
	if _, err := first.runCommand("rm -f " + file); err != nil {
		return err
	}
	if err := c.runLineFor("contains a new CA", "secure", "keelson-controlplane peer-ca create FILE", first.name,
		"FILE", file); err != nil {
		return err
	}
	key, err := first.runCommand("stat -c %a " + file + " && cat " + file)
	if err != nil {
		return err
	}
	mode, key, _ := strings.Cut(key, "\n")
	if mode != "600" {
		return fmt.Errorf("%s has the mode %s", file, mode)
	}
	for _, text := range []string{"keelson-controlplane peer-ca trust FILE", "keelson-controlplane peer-ca use FILE",
		"keelson-controlplane peer-ca prune"} {
		for _, name := range c.replicas {
			if _, err := c.all[name].runCommand("umask 077; cat >" + file + " <<'EOT'\n" + key + "\nEOT"); err != nil {
				return err
			}
			var swaps []string
			if strings.Contains(text, "FILE") {
				swaps = []string{"FILE", file}
			}
			if _, err := c.runLine("secure", text, name, swaps...); err != nil {
				return err
			}
		}
		if err := c.awaitMembers(c.replicas...); err != nil {
			return err
		}
	}
	if err := c.forMachines(func(m *virtualMachine) error {
		out, err := c.runLine("secure", "keelson-controlplane peer-ca list", m.name)
		if err == nil && (strings.Count(out, "signs") != 1 || strings.Contains(out, "believed")) {
			err = fmt.Errorf("%s has the authorities %s", m.name, out)
		}
		_, err2 := m.runCommand("rm " + file)
		return errors.Join(err, err2)
	}, c.replicas...); err != nil {
		return err
	}
	// Removed replicas are listed, because they may still have the cluster's secret.
	told, err := c.runLine("secure", "kctl cluster certs", "site")
	if err != nil {
		return err
	}
	gone := removed.FindAllStringSubmatch(told, -1)
	if len(gone) == 0 {
		return fmt.Errorf("no replica was removed: %s", told)
	}
	for _, name := range gone {
		if _, err := c.runLine("secure", "kctl cluster rotate --clear-removed NAME", "site", "NAME", name[1]); err !=
			nil {
			return err
		}
	}
	if told, err := c.runLine("secure", "kctl cluster certs", "site"); err != nil || removed.MatchString(told) {
		return fmt.Errorf("removed replicas are listed: %s (%w)", told, err)
	}
	return errors.Join(c.awaitMembers(c.replicas...), c.awaitNode(), c.checkService())
}

// removed matches the lines about removed replicas in the output of certs.
var removed = regexp.MustCompile(`(?m)^(\S+) was removed .* still: cluster-secret\.`)

// copyKubeconfig copies the administrator's kubeconfig of a replica to the site.
func (c *vmCluster) copyKubeconfig(name string) error {
	raw, err := c.all[name].runCommand("cat /var/lib/keelson/controlplane/admin.kubeconfig")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.site.dir, c.site.kubeconfig), []byte(raw), 0o600)
}

// revokeNode revokes a node's certificates. The node joins again with a token.
func (c *vmCluster) revokeNode() error {
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	if err := c.runLineFor("node/w1 is revoked", "secure", "kctl cluster revoke node/NAME", "site",
		"NAME", "w1"); err !=
		nil {
		return err
	}
	if err := c.awaitNodeNotReady(); err != nil {
		return err
	}
	// Not by being started again, either.
	if _, err := c.all["w1"].runCommand("systemctl restart keelson-agent"); err != nil {
		return err
	}
	if err := awaitCondition(func() error {
		_, err := c.all["w1"].runCommand("journalctl -u keelson-agent --no-pager -o cat -n 200 | grep -i revoked")
		return err
	}); err != nil {
		return err
	}
	if err := c.awaitNodeNotReady(); err != nil {
		return err
	}
	if err := c.rejoinByToken(); err != nil {
		return err
	}
	// The deletion is the same for a node that is present.
	if err := c.runLineFor("deleted", "operate", "kctl delete node w3", "site", "w3", "w1"); err != nil {
		return err
	}
	if err := awaitCondition(func() error {
		out, err := c.runKctl("get", "nodes", "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("there is %s", out)
		}
		return err
	}); err != nil {
		return err
	}
	if err := c.rejoinByToken(); err != nil {
		return err
	}
	return errors.Join(c.awaitExample(), c.checkService())
}

func (c *vmCluster) awaitNodeNotReady() error {
	return awaitCondition(func() error {
		out, err := c.runKctl("get", "node", "w1", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out == "True" {
			err = errors.New("node w1 is ready")
		}
		return err
	})
}

// rejoinByToken gives the worker a token file that allows it to use the name of the existing Node.
func (c *vmCluster) rejoinByToken() error {
	out, err := c.runLine("secure", "kctl cluster token create --names NAME --replace", "site", "NAME", "w1")
	if err != nil {
		return err
	}
	t, err := parseToken(out, "node")
	if err != nil {
		return err
	}
	if _, err := c.all["w1"].runCommand("umask 077; echo " + t +
		" >/var/lib/keelson/join-token; systemctl restart keelson-agent"); err != nil {
		return err
	}
	return c.awaitNode()
}
