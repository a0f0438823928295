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

// notes are what steps tell those after them: kept with the machines.
type notes struct {
	Dead             string   // the voter that was replaced, and is a standby later
	Left, Lost, Gone string   // of the majority's loss: who is recovered, whose disk is there still, whose machine is a new one
	Pods             string   // processes of pods before
	Others           []string // who is to be a member again
}

func (c *cluster) note(change func(*notes)) (n notes, err error) {
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

// cutLeader takes the leader's power away for good, once: a step that was cut off after that goes on from there.
func (c *cluster) cutLeader() (dead string, err error) {
	n, err := c.note(nil)
	if err != nil {
		return "", err
	}
	if n.Dead != "" {
		if c.all[n.Dead].qemu != nil {
			c.all[n.Dead].cut()
		}
		return n.Dead, c.ask()
	}
	if err := c.allReady(c.replicas...); err != nil {
		return "", err
	}
	s, err := c.status()
	if err != nil {
		return "", err
	}
	if s.Leader == "cp4" || c.all[s.Leader] == nil {
		return "", fmt.Errorf("leader %q", s.Leader)
	}
	if _, err := c.note(func(n *notes) { n.Dead = s.Leader }); err != nil {
		return "", err
	}
	c.all[s.Leader].cut()
	return s.Leader, c.ask()
}

// promoted waits until the standby has the vote of the leader whose power was cut.
func (c *cluster) promoted() error {
	dead, err := c.cutLeader()
	if err != nil {
		return err
	}
	if err := c.apply("first-cut", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: after-the-first-cut}\ndata: {a: b}\n"); err != nil {
		return err
	}
	err = within(long, func() error {
		now, err := c.status()
		if err != nil {
			return errors.Join(err, c.ask())
		}
		if cp4 := member(now, "cp4"); !cp4.Voter || cp4.Ready != "yes" || member(now, dead).Name != "" {
			return fmt.Errorf("cp4 is %+v, %s is %+v, and the autopilot %+v", cp4, dead, member(now, dead), now.Autopilot)
		}
		if p := now.Autopilot; p == nil || len(p.Done) != 1 || p.Done[0].Dead != dead || p.Done[0].Standby != "cp4" {
			return fmt.Errorf("the autopilot says %+v", p)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := c.lineSays("cp4 has the vote of "+dead, "recover", "kctl cluster status", "site"); err != nil {
		return err
	}
	return errors.Join(c.follows(), c.serves())
}

// on switches machines on.
func (c *cluster) on(names ...string) error {
	return c.each(func(m *machine) error {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		return m.on(ctx)
	}, names...)
}

// back is what becomes of the machine that was replaced.
func (c *cluster) back() error {
	n, err := c.note(nil)
	if err != nil {
		return err
	}
	if err := errors.Join(c.ask(), c.on(n.Dead)); err != nil {
		return err
	}
	// Its replica is not ready, and says why.
	if err := until(func() error {
		_, err := c.all[n.Dead].run("journalctl -u keelson-controlplane --no-pager -o cat | grep 'no member any more'")
		return err
	}); err != nil {
		return err
	}
	if s, err := c.status(); err != nil || member(s, n.Dead).Name != "" {
		return fmt.Errorf("%s is a member again: %+v (%w)", n.Dead, s.Members, err)
	}
	const refused = "was replaced by cp4 while it was away"
	if out, err := c.line("install", "kctl cluster up -f cluster.yaml", "site"); err == nil || !strings.Contains(out+err.Error(), refused) {
		return fmt.Errorf("'kctl cluster up' does not refuse %s, which %s: %s (%w)", n.Dead, refused, out, err)
	}
	if err := c.lineSays(n.Dead+" was removed from the cluster", "install", "kctl cluster remove cp1", "site", "cp1", n.Dead); err != nil {
		return err
	}
	if err := c.lineSays("standby "+n.Dead+" is ready", "install", "kctl cluster up -f cluster.yaml", "site"); err != nil {
		return err
	}
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	s, err := c.status()
	if m := member(s, n.Dead); err == nil && (m.Voter || !m.Standby) {
		err = fmt.Errorf("%s is %+v, want a standby", n.Dead, m)
	}
	return err
}

// acknowledged is how many writes are counted again after the loss.
const acknowledged = 60

// written has the cluster acknowledge writes.
func (c *cluster) written() error {
	var all strings.Builder
	for i := range acknowledged {
		fmt.Fprintf(&all, "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: acknowledged-%d, labels: {acknowledged: \"yes\"}}\ndata: {number: \"%d\"}\n", i, i)
	}
	return c.apply("acknowledged", all.String())
}

// kept says whether all of them are there.
func (c *cluster) nothingLost() error {
	out, err := c.kctl("get", "configmaps", "-l", "acknowledged=yes", "-o", "jsonpath={.items[*].data.number}")
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

// lastEntry reads what 'inspect' says.
func lastEntry(said string) (term, index int) {
	if m := regexp.MustCompile(`last entry +(\d+) of term (\d+)`).FindStringSubmatch(said); m != nil {
		index, _ = strconv.Atoi(m[1])
		term, _ = strconv.Atoi(m[2])
	}
	return term, index
}

// lostMajority takes the power of two of three voters, and has the one of those left that has most go on alone.
func (c *cluster) lostMajority() error {
	n, err := c.note(nil)
	if err != nil {
		return err
	}
	if err := errors.Join(c.allReady(c.replicas...), c.written()); err != nil {
		return err
	}
	s, err := c.status()
	if err != nil {
		return err
	}
	voters := slices.DeleteFunc(slices.Clone(c.replicas), func(name string) bool { return name == n.Dead })
	left := voters[slices.IndexFunc(voters, func(name string) bool { return name != s.Leader })]
	lost := slices.DeleteFunc(voters, func(name string) bool { return name == left })
	// What they say that they have applied is in their logs: nothing is acknowledged that they lack.
	if err := until(func() error {
		s, err := c.status()
		for _, name := range []string{left, n.Dead} {
			if m := member(s, name); err == nil && (m.Lag != 0 || m.Applied == 0) {
				err = fmt.Errorf("%s lags by %d", name, m.Lag)
			}
		}
		return err
	}); err != nil {
		return err
	}
	processes, err := c.running()
	if err != nil {
		return err
	}
	if n, err = c.note(func(n *notes) { n.Lost, n.Gone, n.Pods = lost[0], lost[1], processes }); err != nil {
		return err
	}
	for _, name := range lost {
		c.all[name].cut()
	}
	c.asked = left
	if err := c.toAsked(); err != nil {
		return err
	}
	if err := until(func() error { return c.lineSays("NO LEADER", "recover", "kctl cluster status", "site") }); err != nil {
		return err
	}
	if _, err := c.kctlFor(soon, "", "create", "configmap", "without-a-majority", "--request-timeout=20s", "--server="+c.server()); err == nil {
		return errors.New("a minority acknowledges a write")
	}
	best, bestTerm, bestIndex := "", 0, 0
	for _, name := range []string{n.Dead, left} {
		if _, err := c.all[name].run("systemctl stop keelson-controlplane"); err != nil {
			return err
		}
		out, err := c.line("recover", "keelson-controlplane inspect", name)
		if err != nil {
			return err
		}
		term, index := lastEntry(out)
		if index == 0 {
			return fmt.Errorf("inspect of %s says no last entry: %s", name, out)
		}
		if term > bestTerm || term == bestTerm && index >= bestIndex {
			best, bestTerm, bestIndex = name, term, index
		}
	}
	other := map[string]string{left: n.Dead, n.Dead: left}[best]
	if n, err = c.note(func(n *notes) { n.Left, n.Others = best, []string{other, n.Lost, n.Gone} }); err != nil {
		return err
	}
	// It asks at a terminal.
	out, err := c.line("recover", "keelson-controlplane recover", best, "keelson-controlplane recover", "echo keelson | script -qec 'keelson-controlplane recover' /dev/null")
	if err != nil {
		return err
	}
	if !strings.Contains(out, "type the name of the cluster") || !strings.Contains(out, "This replica is alone in its group") {
		return fmt.Errorf("recover says %s", out)
	}
	if _, err := c.line("recover", "systemctl start keelson-controlplane", best); err != nil {
		return err
	}
	if err := c.allReady(best); err != nil {
		return err
	}
	if err := c.nothingLost(); err != nil {
		return err
	}
	if _, err := c.kctl("create", "configmap", "after-the-loss", "--from-literal=a=b"); err != nil {
		return err
	}
	if err := c.nodeReady(); err != nil {
		return err
	}
	if now, err := c.running(); err != nil || now != n.Pods {
		return fmt.Errorf("pods did not go on: before\n%s\nnow\n%s (%w)", n.Pods, now, err)
	}
	return errors.Join(c.follows(), c.serves())
}

// othersAgain brings the other replicas back: by their disks' keys, and on an empty data folder by a token.
func (c *cluster) othersAgain() error {
	n, err := c.note(nil)
	if err != nil {
		return err
	}
	if err := c.ask(); err != nil {
		return err
	}
	at := c.all[n.Left].address
	for _, name := range n.Others[:2] {
		if err := c.on(name); err != nil {
			return err
		}
		// One after the other: with their old data two of them would be a majority of the group of before.
		if _, err := c.all[name].run("systemctl stop keelson-controlplane"); err != nil {
			return err
		}
		if err := c.lineSays("it asks "+at, "recover", "keelson-controlplane rebuild --server ADDRESS-OF-THAT-ONE", name, "ADDRESS-OF-THAT-ONE", at); err != nil {
			return err
		}
		if _, err := c.line("recover", "systemctl start keelson-controlplane", name); err != nil {
			return err
		}
		if err := c.allReady(n.Left, name); err != nil {
			return err
		}
	}
	if err := c.on(n.Gone); err != nil {
		return err
	}
	if _, err := c.all[n.Gone].run("systemctl stop keelson-controlplane; rm -rf /var/lib/keelson/controlplane"); err != nil {
		return err
	}
	if err := c.join("keelson-controlplane join --advertise-address OWN-ADDRESS --token TOKEN --server ADDRESS-OF-ANOTHER", n.Gone, n.Left,
		"OWN-ADDRESS", c.all[n.Gone].address); err != nil {
		return err
	}
	if _, err := c.line("recover", "systemctl start keelson-controlplane", n.Gone); err != nil {
		return err
	}
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	// One by itself asks whom it knew.
	name := n.Others[1]
	if _, err := c.all[name].run("systemctl stop keelson-controlplane"); err != nil {
		return err
	}
	if err := c.lineSays("it asks", "recover", "keelson-controlplane rebuild", name); err != nil {
		return err
	}
	if _, err := c.line("recover", "systemctl start keelson-controlplane", name); err != nil {
		return err
	}
	return errors.Join(c.allReady(c.replicas...), c.nothingLost(), c.serves())
}

// join has a machine without a replica's data join by a new token.
func (c *cluster) join(text, name, by string, swaps ...string) error {
	out, err := c.line("recover", "kctl cluster token create --role controlplane", "site")
	if err != nil {
		return err
	}
	t, err := token(out, "controlplane")
	if err != nil {
		return err
	}
	_, err = c.line("recover", text, name, append([]string{"TOKEN", t, "ADDRESS-OF-ANOTHER", c.all[by].address}, swaps...)...)
	return err
}

// standbyByHand has a replica leave, and join as a standby: by the program, and by the script.
func (c *cluster) standbyByHand() error {
	n, err := c.note(nil)
	if err != nil {
		return err
	}
	name := n.Gone
	if err := c.allReady(c.replicas...); err != nil {
		return err
	}
	for _, text := range []string{
		"keelson-controlplane join --standby --advertise-address OWN-ADDRESS --token TOKEN --server ADDRESS-OF-ANOTHER",
		"sudo ./install.sh server --standby --server ADDRESS-OF-ANOTHER --token TOKEN",
	} {
		if err := c.lineSays(name+" is no member any more", "recover", "kctl cluster member remove cp2", "site", "cp2", name); err != nil {
			return err
		}
		if _, err := c.all[name].run("systemctl stop keelson-controlplane; rm -rf /var/lib/keelson/controlplane"); err != nil {
			return err
		}
		if err := c.refusedByDeletedToken(name, n.Left); err != nil {
			return err
		}
		var swaps []string
		if strings.HasPrefix(text, "sudo") {
			if err := c.unpacked(name, nextRelease); err != nil {
				return err
			}
		} else {
			swaps = []string{"OWN-ADDRESS", c.all[name].address}
		}
		if err := c.join(text, name, n.Left, swaps...); err != nil {
			return err
		}
		if _, err := c.line("recover", "systemctl start keelson-controlplane", name); err != nil {
			return err
		}
		if err := c.allReady(c.replicas...); err != nil {
			return err
		}
		if s, err := c.status(); err != nil || !member(s, name).Standby || member(s, name).Voter {
			return fmt.Errorf("%s is %+v, want a standby (%w)", name, member(s, name), err)
		}
	}
	return nil
}

// refusedByDeletedToken has nobody join with a token that was deleted.
func (c *cluster) refusedByDeletedToken(name, by string) error {
	if _, err := c.sh(soon, `kctl cluster token create --role controlplane >token && kctl cluster token delete "$(cat token)"`); err != nil {
		return err
	}
	deleted, err := os.ReadFile(filepath.Join(c.site.dir, "token"))
	if err != nil {
		return err
	}
	out, err := c.all[name].run("keelson-controlplane join --advertise-address " + c.all[name].address + " --server " + c.all[by].address + " --token " + strings.TrimSpace(string(deleted)))
	if err == nil {
		return fmt.Errorf("%s has joined with a deleted token: %s", name, out)
	}
	if _, err := c.all[name].run("test ! -e /var/lib/keelson/controlplane/cluster.json && rm -rf /var/lib/keelson/controlplane"); err != nil {
		return fmt.Errorf("a refused join has left a replica: %w", err)
	}
	return nil
}
