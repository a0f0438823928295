package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// installKubeconfig gives root of a machine the kubeconfig of the site.
func (c *vmCluster) installKubeconfig(name string) error {
	if err := c.useReadyReplica(); err != nil {
		return err
	}
	raw, err := os.ReadFile(filepath.Join(c.site.dir, c.site.kubeconfig))
	if err != nil {
		return err
	}
	_, err = c.all[name].runCommand("umask 077; cd /root; export KUBECONFIG=/root/kubeconfig; cat >/root/kubeconfig " +
		"<<'EOT'\n" + string(raw) + "\nEOT")
	return err
}

// checkBackups verifies a backup, inspects it, and restores the cluster from it.
func (c *vmCluster) checkBackups() error {
	n, err := c.updateNotes(nil)
	if err != nil {
		return err
	}
	at := n.Left
	m := c.all[at]
	if err := errors.Join(c.awaitMembers(c.replicas...), c.installKubeconfig(at)); err != nil {
		return err
	}
	if err := awaitCondition(func() error {
		return c.runLineFor("/var/backups/keelson/", "recover", "keelson-controlplane backup list", at)
	}); err != nil {
		return err
	}
	if _, err := c.runLine("recover", "keelson-controlplane backup fetch /root/newest", at, "/root/newest",
		"/root/fetched"); err != nil {
		return err
	}
	if _, err := c.runLine("recover", "kctl cluster restore-test", at); err != nil {
		return err
	}
	if _, err := c.runLine("recover", "kctl cluster restore-test --fresh", at); err != nil {
		return err
	}
	if _, err := c.runKctl("create", "configmap", "in-the-backup", "--from-literal=a=kept"); err != nil {
		return err
	}
	if _, err := c.runLine("operate", "kctl cluster backup today", at, "today", "/var/backups/keelson/by-hand"); err !=
		nil {
		return err
	}
	if err := c.runLineFor("configmaps", "operate", "kctl cluster backup inspect today", at, "today",
		"/var/backups/keelson/by-hand"); err != nil {
		return err
	}
	if _, err := c.runLine("operate", "kctl cluster restore-test today", at, "today",
		"/var/backups/keelson/by-hand"); err != nil {
		return err
	}
	if _, err := m.runCommand("cp /var/backups/keelson/by-hand /root/newest"); err != nil {
		return err
	}
	if err := c.inspectBackup(at); err != nil {
		return err
	}
	if _, err := c.runKctl("create", "configmap", "after-the-backup", "--from-literal=a=b"); err != nil {
		return err
	}
	if err := c.forMachines(func(m *virtualMachine) error {
		_, err := m.runCommand("systemctl stop keelson-controlplane")
		return err
	}, c.replicas...); err != nil {
		return err
	}
	if err := c.runLineFor("sealed", "recover", "keelson-controlplane backup inspect /root/newest", at); err != nil {
		return err
	}
	if _, err := c.runLine("recover", "keelson-controlplane restore /root/newest --replace", at); err != nil {
		return err
	}
	if _, err := c.runLine("recover", "systemctl start keelson-controlplane", at); err != nil {
		return err
	}
	if err := c.awaitMembers(at); err != nil {
		return err
	}
	for _, name := range n.Others {
		if _, err := c.runLine("recover", "keelson-controlplane rebuild --server ADDRESS-OF-THE-FIRST", name,
			"ADDRESS-OF-THE-FIRST", m.address); err != nil {
			return err
		}
		if _, err := c.runLine("recover", "systemctl start keelson-controlplane", name); err != nil {
			return err
		}
	}
	if err := errors.Join(c.awaitMembers(c.replicas...), c.checkObjects()); err != nil {
		return err
	}
	if out, err := c.runKctl("get", "configmap", "in-the-backup", "after-the-backup", "--ignore-not-found", "-o",
		"name"); err != nil || strings.TrimSpace(out) != "configmap/in-the-backup" {
		return fmt.Errorf("of what was made before and after the backup there is %q (%w)", out, err)
	}
	return errors.Join(c.awaitNode(), c.awaitExample(), c.checkService())
}

// inspectBackup serves a backup and reads one object of it.
func (c *vmCluster) inspectBackup(at string) error {
	m := c.all[at]
	text := "kctl cluster backup serve /backups/today"
	out, err := c.runLine("recover", text, at, text,
		"(kctl cluster backup serve /root/newest >/root/served 2>&1 & echo $! >/root/serving); "+
			"i=0; until grep KUBECONFIG /root/served; do i=$((i+1)); [ $i -lt 400 ] && kill -0 $(cat "+
			"/root/serving) || { "+
			"cat /root/served; exit 1; }; sleep 1; done")
	if err != nil {
		return err
	}
	found := regexp.MustCompile(`KUBECONFIG=\S+`).FindString(out)
	if err := c.runLineFor("a: kept", "recover", "KUBECONFIG=... kubectl get configmap NAME -o yaml", at,
		"KUBECONFIG=...", found, "kubectl", "kctl", "NAME", "in-the-backup"); err != nil {
		return err
	}
	_, err = m.runCommand("kill -INT $(cat /root/serving)")
	return err
}

// replaceKeys is the recovery when pki/ of all replicas is lost: new keys, the data of a backup,
// and workers that join again.
func (c *vmCluster) replaceKeys() error {
	n, err := c.updateNotes(nil)
	if err != nil {
		return err
	}
	at := n.Left
	m := c.all[at]
	before, err := c.containerProcesses()
	if err != nil {
		return err
	}
	if _, err := m.runCommand("cp /var/lib/keelson/controlplane/pki/store.keys /root/old.keys"); err != nil {
		return err
	}
	if err := c.forMachines(func(m *virtualMachine) error {
		_, err := m.runCommand("systemctl stop keelson-controlplane; rm -rf /var/lib/keelson/controlplane")
		return err
	}, c.replicas...); err != nil {
		return err
	}
	if _, err := c.runLine("recover", "keelson-controlplane init --advertise-address OWN-ADDRESS --cluster-name NAME",
		at,
		"OWN-ADDRESS", m.address, "NAME", "keelson"); err != nil {
		return err
	}
	if _, err := c.runLine("recover", "keelson-controlplane restore /root/newest --any-cluster --backup-keys "+
		"OLD-STORE.KEYS", at, "OLD-STORE.KEYS", "/root/old.keys"); err != nil {
		return err
	}
	if _, err := c.runLine("recover", "systemctl start keelson-controlplane", at); err != nil {
		return err
	}
	kubeconfig, err := m.runCommand("cat /var/lib/keelson/controlplane/admin.kubeconfig")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(c.site.dir, c.site.kubeconfig), []byte(kubeconfig), 0o600); err != nil {
		return err
	}
	if err := errors.Join(c.awaitMembers(at), c.checkObjects()); err != nil {
		return err
	}
	out, err := c.runLine("recover", "kctl cluster token create --names w1,w2 --replace", "site", "w1,w2", "w1")
	if err != nil {
		return err
	}
	t, err := parseToken(out, "node")
	if err != nil {
		return err
	}
	if _, err := c.runLine("recover", "sudo sh -c 'umask 077 && echo TOKEN >/var/lib/keelson/join-token' && sudo "+
		"systemctl restart keelson-agent", "w1", "TOKEN", t); err != nil {
		return err
	}
	if err := errors.Join(c.awaitNode(), c.awaitExample(), c.checkService()); err != nil {
		return err
	}
	if now, err := c.containerProcesses(); err != nil || now != before {
		return fmt.Errorf("pods were restarted: before\n%s\nnow\n%s (%w)", before, now, err)
	}
	return nil
}
