package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// stepNotes is data that steps pass to later steps. It is stored beside kept machines.
type stepNotes struct {
	Dead string // the voter that was replaced, and is a standby later
	// replicas of the lost majority: the recovered one, the one with its disk, and the one on a new
	// machine
	Left, Lost, Gone string
	Pods             string   // processes of pods before
	Others           []string // replicas that must become members again
}

func (c *vmCluster) updateNotes(change func(*stepNotes)) (n stepNotes, err error) {
	at := filepath.Join(c.site.dir, "notes.json")
	if raw, err := os.ReadFile(at); err == nil {
		if err := json.Unmarshal(raw, &n); err != nil {
			return n, err
		}
	}
	if change == nil {
		return n, nil
	}
	change(&n)
	raw, err := json.Marshal(n)
	if err == nil {
		err = os.WriteFile(at, raw, 0o600)
	}
	return n, err
}

// cutLeader cuts the power of the leader's machine permanently, once: a repeated step continues
// after it.
func (c *vmCluster) cutLeader() (dead string, err error) {
	n, err := c.updateNotes(nil)
	if err != nil {
		return "", err
	}
	if n.Dead != "" {
		if c.all[n.Dead].qemu != nil {
			c.all[n.Dead].cutPower()
		}
		return n.Dead, c.useReadyReplica()
	}
	if err := c.awaitMembers(c.replicas...); err != nil {
		return "", err
	}
	s, err := c.clusterStatus()
	if err != nil {
		return "", err
	}
	if s.Leader == "cp4" || c.all[s.Leader] == nil {
		return "", fmt.Errorf("leader %q", s.Leader)
	}
	if _, err := c.updateNotes(func(n *stepNotes) { n.Dead = s.Leader }); err != nil {
		return "", err
	}
	c.all[s.Leader].cutPower()
	return s.Leader, c.useReadyReplica()
}

// awaitPromotion waits until the standby has the vote of the lost leader.
func (c *vmCluster) awaitPromotion() error {
	dead, err := c.cutLeader()
	if err != nil {
		return err
	}
	if err := c.applyManifest("first-cut",
		"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: after-the-first-cut}\ndata: {a: "+
			"b}\n"); err != nil {
		return err
	}
	err = awaitWithin(long, func() error {
		now, err := c.clusterStatus()
		if err != nil {
			return errors.Join(err, c.useReadyReplica())
		}
		if cp4 := memberStatus(now, "cp4"); !cp4.Voter || cp4.Ready != "yes" || memberStatus(now, dead).Name != "" {
			return fmt.Errorf("cp4 is %+v, %s is %+v, and the autopilot %+v", cp4, dead,
				memberStatus(now, dead), now.Autopilot)
		}
		if p := now.Autopilot; p == nil || len(p.Done) != 1 || p.Done[0].Dead != dead || p.Done[0].Standby != "cp4" {
			return fmt.Errorf("the autopilot's status is %+v", p)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := c.runLineFor("cp4 has the vote of "+dead, "recover", "kctl cluster status", "site"); err != nil {
		return err
	}
	return errors.Join(c.awaitSharedAddress(), c.checkService())
}

// startMachines switches machines on.
func (c *vmCluster) startMachines(names ...string) error {
	return c.forMachines(func(m *virtualMachine) error {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		return m.switchOn(ctx)
	}, names...)
}

// checkReplaced checks the replaced machine when it returns.
func (c *vmCluster) checkReplaced() error {
	n, err := c.updateNotes(nil)
	if err != nil {
		return err
	}
	if err := errors.Join(c.useReadyReplica(), c.startMachines(n.Dead)); err != nil {
		return err
	}
	// Its replica is not ready and logs the reason.
	if err := awaitCondition(func() error {
		_, err := c.all[n.Dead].runCommand("journalctl -u keelson-controlplane --no-pager -o cat | grep " +
			"'no longer a member'")
		return err
	}); err != nil {
		return err
	}
	if s, err := c.clusterStatus(); err != nil || memberStatus(s, n.Dead).Name != "" {
		return fmt.Errorf("%s is a member again: %+v (%w)", n.Dead, s.Members, err)
	}
	const refused = "was replaced by cp4 while it was away"
	if out, err := c.runLine("install", "kctl cluster up -f cluster.yaml", "site"); err == nil ||
		!strings.Contains(out+err.Error(), refused) {
		return fmt.Errorf("'kctl cluster up' does not refuse %s, which %s: %s (%w)", n.Dead, refused, out, err)
	}
	if err := c.runLineFor(n.Dead+" was removed from the cluster", "install", "kctl cluster remove cp1", "site", "cp1",
		n.Dead); err != nil {
		return err
	}
	if err := c.runLineFor("standby "+n.Dead+" is ready", "install", "kctl cluster up -f cluster.yaml", "site"); err !=
		nil {
		return err
	}
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	s, err := c.clusterStatus()
	if m := memberStatus(s, n.Dead); err == nil && (m.Voter || !m.Standby) {
		err = fmt.Errorf("%s is %+v, want a standby", n.Dead, m)
	}
	return err
}

// acknowledged is how many writes are counted again after the loss.
const acknowledged = 60

// writeObjects makes the cluster acknowledge writes.
func (c *vmCluster) writeObjects() error {
	var all strings.Builder
	for i := range acknowledged {
		fmt.Fprintf(&all, "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: acknowledged-%d, labels: "+
			"{acknowledged: \"yes\"}}\ndata: {number: \"%d\"}\n", i, i)
	}
	return c.applyManifest("acknowledged", all.String())
}

// checkObjects checks that all objects of writeObjects exist.
func (c *vmCluster) checkObjects() error {
	out, err := c.runKctl("get", "configmaps", "-l", "acknowledged=yes", "-o", "jsonpath={.items[*].data.number}")
	if err != nil {
		return err
	}
	is := strings.Fields(out)
	for i := range acknowledged {
		if !slices.Contains(is, strconv.Itoa(i)) {
			return fmt.Errorf("write %d was acknowledged and is lost: there are %v", i, is)
		}
	}
	return nil
}

// parseLastEntry returns the term and the index in the output of "inspect".
func parseLastEntry(said string) (term, index int) {
	if m := regexp.MustCompile(`last entry +(\d+) of term (\d+)`).FindStringSubmatch(said); m != nil {
		index, _ = strconv.Atoi(m[1])
		term, _ = strconv.Atoi(m[2])
	}
	return term, index
}

// recoverMajority cuts the power of two of three voters and continues with the remaining replica
// that has the most entries.
func (c *vmCluster) recoverMajority() error {
	n, err := c.updateNotes(nil)
	if err != nil {
		return err
	}
	if err := errors.Join(c.awaitMembers(c.replicas...), c.writeObjects()); err != nil {
		return err
	}
	s, err := c.clusterStatus()
	if err != nil {
		return err
	}
	voters := slices.DeleteFunc(slices.Clone(c.replicas), func(name string) bool { return name == n.Dead })
	left := voters[slices.IndexFunc(voters, func(name string) bool { return name != s.Leader })]
	lost := slices.DeleteFunc(voters, func(name string) bool { return name == left })
	// The revision that they report as applied is in their logs: no acknowledged entry is missing.
	if err := awaitCondition(func() error {
		s, err := c.clusterStatus()
		for _, name := range []string{left, n.Dead} {
			if m := memberStatus(s, name); err == nil && (m.Lag != 0 || m.Applied == 0) {
				err = fmt.Errorf("%s lags by %d", name, m.Lag)
			}
		}
		return err
	}); err != nil {
		return err
	}
	processes, err := c.containerProcesses()
	if err != nil {
		return err
	}
	if n, err = c.updateNotes(func(n *stepNotes) { n.Lost, n.Gone, n.Pods = lost[0], lost[1], processes }); err != nil {
		return err
	}
	for _, name := range lost {
		c.all[name].cutPower()
	}
	c.apiMachine = left
	if err := c.pointKubeconfig(); err != nil {
		return err
	}
	if err := awaitCondition(func() error {
		return c.runLineFor("NO LEADER", "recover", "kctl cluster status", "site")
	}); err != nil {
		return err
	}
	if _, err := c.kctlFor(soon, "", "create", "configmap", "without-a-majority", "--request-timeout=20s",
		"--server="+c.serverURL()); err == nil {
		return errors.New("a minority acknowledges a write")
	}
	best, err := c.stopAndCompareLogs(n.Dead, left)
	if err != nil {
		return err
	}
	other := map[string]string{left: n.Dead, n.Dead: left}[best]
	others := []string{other, n.Lost, n.Gone}
	if n, err = c.updateNotes(func(n *stepNotes) { n.Left, n.Others = best, others }); err != nil {
		return err
	}
	// The command prompts at a terminal.
	out, err := c.runLine("recover", "keelson-controlplane recover", best, "keelson-controlplane recover",
		"echo keelson | script -qec 'keelson-controlplane recover' /dev/null")
	if err != nil {
		return err
	}
	if !strings.Contains(out, "type the name of the cluster") ||
		!strings.Contains(out, "This replica is the only member of its raft cluster") {
		return fmt.Errorf("recover says %s", out)
	}
	if _, err := c.runLine("recover", "systemctl start keelson-controlplane", best); err != nil {
		return err
	}
	if err := c.awaitMembers(best); err != nil {
		return err
	}
	if err := c.checkObjects(); err != nil {
		return err
	}
	if _, err := c.runKctl("create", "configmap", "after-the-loss", "--from-literal=a=b"); err != nil {
		return err
	}
	if err := c.awaitNode(); err != nil {
		return err
	}
	if now, err := c.containerProcesses(); err != nil || now != n.Pods {
		return fmt.Errorf("pods were restarted: before\n%s\nnow\n%s (%w)", n.Pods, now, err)
	}
	return errors.Join(c.awaitSharedAddress(), c.checkService())
}

// stopAndCompareLogs stops replicas and returns the one with the latest entry in its log.
func (c *vmCluster) stopAndCompareLogs(names ...string) (best string, err error) {
	bestTerm, bestIndex := 0, 0
	for _, name := range names {
		if _, err := c.all[name].runCommand("systemctl stop keelson-controlplane"); err != nil {
			return "", err
		}
		out, err := c.runLine("recover", "keelson-controlplane inspect", name)
		if err != nil {
			return "", err
		}
		term, index := parseLastEntry(out)
		if index == 0 {
			return "", fmt.Errorf("the output of inspect of %s has no last entry: %s", name, out)
		}
		if term > bestTerm || term == bestTerm && index >= bestIndex {
			best, bestTerm, bestIndex = name, term, index
		}
	}
	return best, nil
}

// restoreOthers brings the other replicas back: with the keys on their disks, and on an empty data
// folder with a token.
func (c *vmCluster) restoreOthers() error {
	n, err := c.updateNotes(nil)
	if err != nil {
		return err
	}
	if err := c.useReadyReplica(); err != nil {
		return err
	}
	at := c.all[n.Left].address
	for _, name := range n.Others[:2] {
		if err := c.startMachines(name); err != nil {
			return err
		}
		// One after the other: with their old data two of them would be a majority of the previous
		// group.
		if _, err := c.all[name].runCommand("systemctl stop keelson-controlplane"); err != nil {
			return err
		}
		if err := c.runLineFor("it asks "+at, "recover", "keelson-controlplane rebuild --server ADDRESS-OF-THAT-ONE",
			name, "ADDRESS-OF-THAT-ONE", at); err != nil {
			return err
		}
		if _, err := c.runLine("recover", "systemctl start keelson-controlplane", name); err != nil {
			return err
		}
		if err := c.awaitMembers(n.Left, name); err != nil {
			return err
		}
	}
	if err := c.startMachines(n.Gone); err != nil {
		return err
	}
	if _, err := c.all[n.Gone].runCommand("systemctl stop keelson-controlplane; rm -rf " +
		"/var/lib/keelson/controlplane"); err !=
		nil {
		return err
	}
	if err := c.joinEmpty("keelson-controlplane join --advertise-address OWN-ADDRESS --token TOKEN --server "+
		"ADDRESS-OF-ANOTHER", n.Gone, n.Left,
		"OWN-ADDRESS", c.all[n.Gone].address); err != nil {
		return err
	}
	if _, err := c.runLine("recover", "systemctl start keelson-controlplane", n.Gone); err != nil {
		return err
	}
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	// A single replica asks its previous peers.
	name := n.Others[1]
	if _, err := c.all[name].runCommand("systemctl stop keelson-controlplane"); err != nil {
		return err
	}
	if err := c.runLineFor("it asks", "recover", "keelson-controlplane rebuild", name); err != nil {
		return err
	}
	if _, err := c.runLine("recover", "systemctl start keelson-controlplane", name); err != nil {
		return err
	}
	return errors.Join(c.awaitMembers(c.replicas...), c.checkObjects(), c.checkService())
}

// joinEmpty makes a machine without a replica's data join with a new token.
func (c *vmCluster) joinEmpty(text, name, by string, swaps ...string) error {
	out, err := c.runLine("recover", "kctl cluster token create --role controlplane", "site")
	if err != nil {
		return err
	}
	t, err := parseToken(out, "controlplane")
	if err != nil {
		return err
	}
	_, err = c.runLine("recover", text, name, append([]string{"TOKEN", t, "ADDRESS-OF-ANOTHER", c.all[by].address},
		swaps...)...)
	return err
}

// addStandbyByHand removes a replica and makes it join as a standby, with the program and with the
// script.
func (c *vmCluster) addStandbyByHand() error {
	n, err := c.updateNotes(nil)
	if err != nil {
		return err
	}
	name := n.Gone
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	for _, text := range []string{
		"keelson-controlplane join --standby --advertise-address OWN-ADDRESS --token TOKEN --server ADDRESS-OF-ANOTHER",
		"sudo ./install.sh server --standby --server ADDRESS-OF-ANOTHER --token TOKEN",
	} {
		if err := c.runLineFor(name+" is no member any more", "recover",
			"kctl cluster member remove cp2", "site", "cp2",
			name); err != nil {
			return err
		}
		if _, err := c.all[name].runCommand("systemctl stop keelson-controlplane; rm -rf " +
			"/var/lib/keelson/controlplane"); err != nil {
			return err
		}
		if err := c.checkDeletedToken(name, n.Left); err != nil {
			return err
		}
		var swaps []string
		if strings.HasPrefix(text, "sudo") {
			if err := c.unpackRelease(name, nextRelease); err != nil {
				return err
			}
		} else {
			swaps = []string{"OWN-ADDRESS", c.all[name].address}
		}
		if err := c.joinEmpty(text, name, n.Left, swaps...); err != nil {
			return err
		}
		if _, err := c.runLine("recover", "systemctl start keelson-controlplane", name); err != nil {
			return err
		}
		if err := c.awaitMembers(c.replicas...); err != nil {
			return err
		}
		if s, err := c.clusterStatus(); err != nil || !memberStatus(s, name).Standby || memberStatus(s, name).Voter {
			return fmt.Errorf("%s is %+v, want a standby (%w)", name, memberStatus(s, name), err)
		}
	}
	return nil
}

// checkDeletedToken checks that a deleted token is refused.
func (c *vmCluster) checkDeletedToken(name, by string) error {
	if _, err := c.runAtSite(soon,
		`kctl cluster token create --role controlplane >token && kctl cluster token delete "$(cat `+
			`token)"`); err != nil {
		return err
	}
	deleted, err := os.ReadFile(filepath.Join(c.site.dir, "token"))
	if err != nil {
		return err
	}
	out, err := c.all[name].runCommand("keelson-controlplane join --advertise-address " +
		c.all[name].address + " --server " +
		c.all[by].address + " --token " + strings.TrimSpace(string(deleted)))
	if err == nil {
		return fmt.Errorf("%s has joined with a deleted token: %s", name, out)
	}
	if _, err := c.all[name].runCommand("test ! -e /var/lib/keelson/controlplane/cluster.json && rm -rf " +
		"/var/lib/keelson/controlplane"); err != nil {
		return fmt.Errorf("a refused join has left a replica: %w", err)
	}
	return nil
}
