package vm

import (
	"errors"
	"fmt"
)

// runDailyPages runs the commands of the how-to pages for operators in their order, on one worker
// where a page has three. test/e2e compares their output with the pages on a lab.
func (c *vmCluster) runDailyPages() error {
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	does := func(want, text string, swaps ...string) func() error {
		return func() error { return c.runLineFor(want, "operate", text, "site", swaps...) }
	}
	for _, do := range []func() error{
		does("leader", "kctl cluster status"),
		does("w1", "kctl get nodes"),
		does("readyz check passed", "kctl get --raw '/readyz?verbose'"),
		does("w1", "kctl why node/w2", "w2", "w1"),
		does("node/w1 drained", "kctl drain w3 --ignore-daemonsets --delete-emptydir-data", "w3", "w1"),
		does("SchedulingDisabled", "kctl get node w3", "w3", "w1"),
		does("node/w1 uncordoned", "kctl uncordon w3", "w3", "w1"),
		does("leads now", "kctl cluster transfer-leader"),
		c.awaitSharedAddress,
		does("cp1", "kctl cluster member list"),
		does("", "token=$(kctl cluster token create --names w9 --ttl 1h)", "--ttl 1h)",
			`--ttl 1h) && echo "$token" >token`),
		does("w9", "kctl cluster token list"),
		does("nobody joins with it any more", `kctl cluster token delete "$token"`, `"$token"`, `"$(cat token)"`),

		does("authority", "kctl cluster certs"),
		does("", `cp "$KUBECONFIG" renewed && KUBECONFIG=renewed kctl cluster renew`),
		does("Active", "KUBECONFIG=renewed kctl get namespace kube-system"),
		does("checked", "kctl cluster backup today", "kctl cluster backup today",
			"rm -f today && kctl cluster backup today 2>&1"),
		does("is forgotten", "kctl cluster compact"),
		does("created", "kctl create deployment looked-at --image=keelson.dev/hello:v1"),
		does("successfully rolled out", "kctl rollout status deployment/looked-at --timeout=60s", "60s", soon.String()),
		does("", "kctl trace deployment/looked-at"),
		does("", "kctl why deployment/looked-at"),
		does("deleted", "kctl delete deployment looked-at --wait=false"),
		does("", "kctl cluster support-bundle bundle.tar.gz", "bundle.tar.gz",
			"bundle-$$.tar.gz && mv bundle-$$.tar.gz bundle.tar.gz"),
		does("", "tar -tzf bundle.tar.gz"),
		does("", "kctl top", "top", "top nodes"),
		does("", "kctl net policies"),
		does("", "kctl net services"),
	} {
		if err := do(); err != nil {
			return err
		}
	}
	if out, err := c.runLine("operate", "journalctl -u keelson-agent", "w1", "keelson-agent",
		"keelson-agent --no-pager | tail -n 5"); err != nil || out == "" {
		return fmt.Errorf("the journal contains %q (%w)", out, err)
	}
	if out, err := c.runLine("operate", "journalctl -u keelson-controlplane", c.apiMachine, "keelson-controlplane",
		"keelson-controlplane --no-pager | tail -n 5"); err != nil || out == "" {
		return fmt.Errorf("the journal contains %q (%w)", out, err)
	}
	if err := errors.Join(c.checkSettings(), c.editUnit()); err != nil {
		return err
	}
	if _, err := c.runLine("install", "systemctl stop keelson-agent keelson-pods", "w1"); err != nil {
		return err
	}
	if left, err := c.all["w1"].runCommand("pgrep -x hello || true"); err != nil || left != "" {
		return fmt.Errorf("pods run without keelson-pods: %s (%w)", left, err)
	}
	if _, err := c.all["w1"].runCommand("systemctl start keelson-agent"); err != nil {
		return err
	}
	return errors.Join(c.awaitExample(), c.checkService())
}

// checkSettings validates settings and limits the memory of all pods.
func (c *vmCluster) checkSettings() error {
	if _, err := c.runLine("install", "keelson-controlplane check", c.apiMachine); err != nil {
		return err
	}
	if _, err := c.runLine("install", "systemctl set-property keelson.slice MemoryMax=...", "w1", "...", "900M"); err !=
		nil {
		return err
	}
	if is, err := c.all["w1"].runCommand("cat /sys/fs/cgroup/keelson.slice/memory.max"); err != nil ||
		is != "943718400" {
		return fmt.Errorf("all pods may have %s bytes (%w)", is, err)
	}
	if _, err := c.all["w1"].runCommand("systemctl revert keelson.slice && systemctl set-property " +
		"--runtime keelson.slice " +
		"MemoryMax=infinity"); err != nil {
		return err
	}
	return c.checkService()
}

// editUnit adds the lines of docs/how-to/share-an-api-address.md to a replica's unit with a script
// as the editor. The replica continues to run.
func (c *vmCluster) editUnit() error {
	m := c.all[c.apiMachine]
	const drop = "[Service]\nCapabilityBoundingSet=CAP_NET_ADMIN CAP_NET_RAW\nRestrictAddressFamilies=AF_PACKET"
	const override = "/etc/systemd/system/keelson-controlplane.service.d/override.conf"
	if _, err := m.runCommand("rm -f " + override + "; printf '" + drop +
		"\\n' >/root/drop; printf '#!/bin/sh\\nfor f; do :; done\\nsed -i \"2r /root/drop\" \"$f\"\\n' " +
		">/root/editor; chmod +x /root/editor"); err != nil {
		return err
	}
	const text = "systemctl edit keelson-controlplane"
	if _, err := c.runLine("install", text, m.name, text,
		"SYSTEMD_EDITOR=/root/editor script -qec '"+text+"' /dev/null"); err != nil {
		return err
	}
	if is, err := m.runCommand("cat " + override + " && echo && systemctl is-active keelson-controlplane"); err !=
		nil ||
		is != drop+"\nactive" {
		return fmt.Errorf("%s has %q (%w)", override, is, err)
	}
	_, err := m.runCommand("rm " + override + " && systemctl daemon-reload")
	return err
}
