package vm

import (
	"errors"
	"fmt"
	"strings"
)

// packaged is the worker that nothing but the package, and a person, makes one.
const packaged = "w2"

// installPackage installs the package of a release with the command of a page.
func (c *vmCluster) installPackage(page, text, release string) (string, error) {
	words := strings.Fields(text)
	return c.runLine(page, text, packaged, words[len(words)-1], release+"/keelson-*-linux-amd64.deb")
}

// checkPackageRefused checks that the package is not installed while the disk for the data is not
// mounted.
func (c *vmCluster) checkPackageRefused(page, text, release string) error {
	m := c.all[packaged]
	const table = "LABEL=none /var/lib/keelson/local-volumes ext4 nofail 0 2"
	if _, err := m.runCommand("echo '" + table + "' >>/etc/fstab"); err != nil {
		return err
	}
	// dpkg itself records the name of a package that it did not install.
	const there = "cat /usr/bin/keelson-* | sha256sum; dpkg-query -W -f '${db:Status-Status} ${Version}\\n' keelson " +
		"2>/dev/null | grep -v ^not-installed; systemctl show -p MainPID keelson-agent"
	before, err := m.runCommand(there)
	if err != nil {
		return err
	}
	said, err := c.installPackage(page, text, release)
	if err == nil ||
		!strings.Contains(said,
			"nothing was changed: a disk is to be mounted at /var/lib/keelson/local-volumes and is not") {
		return fmt.Errorf("dpkg does not refuse to install over a mount point: %s (%w)", said, err)
	}
	after, err := m.runCommand(there)
	if err != nil || after != before {
		return fmt.Errorf("dpkg refused, and left\n%s\nof\n%s (%w)", after, before, err)
	}
	_, err = m.runCommand("sed -i '/^LABEL=none/d' /etc/fstab")
	return err
}

// installByPackage adds a worker with the commands of docs/how-to/install-with-package.md.
func (c *vmCluster) installByPackage() error {
	if err := errors.Join(c.bootMachines(packaged), c.awaitMembers(c.replicas...)); err != nil {
		return err
	}
	const deb = "sudo dpkg -i keelson-v1.0.0-linux-amd64.deb"
	if err := c.checkPackageRefused("install", deb, thisRelease); err != nil {
		return err
	}
	if _, err := c.installPackage("install", deb, thisRelease); err != nil {
		return err
	}
	m := c.all[packaged]
	// The example settings are replaced by real ones, with a typing error at first.
	if _, err := m.runCommand("sed -i -e 's/^# server:.*/server: [" + c.all[c.apiMachine].address +
		":6444]/' -e 's/^# token-file:/token-files:/' -e 's/^# node-labels:/node-labels:/' " +
		"/etc/keelson/agent.yaml"); err != nil {
		return err
	}
	if said, err := c.runLine("install", "keelson-agent check", packaged); err == nil ||
		!strings.Contains(said, "token-files") {
		return fmt.Errorf("the key token-files is no error: %s (%w)", said, err)
	}
	if _, err := m.runCommand("sed -i 's/^token-files:/token-file:/' /etc/keelson/agent.yaml"); err != nil {
		return err
	}
	if _, err := c.runLine("install", "keelson-agent check", packaged); err != nil {
		return err
	}
	said, err := c.runLine("operate", "token=$(kctl cluster token create --names w9 --ttl 1h)", "site", "w9", packaged,
		"--ttl 1h)", `--ttl 1h) && echo "$token"`)
	if err != nil {
		return err
	}
	t, err := parseToken(said, "node")
	if err != nil {
		return err
	}
	if _, err := m.runCommand("umask 077; mkdir -p /var/lib/keelson; echo " + t +
		" >/var/lib/keelson/join-token"); err !=
		nil {
		return err
	}
	if _, err := c.runLine("install", "systemctl enable --now keelson-agent", packaged); err != nil {
		return err
	}
	if err := c.awaitOutput("fast True", "get", "node", packaged, "-o",
		`jsonpath={.metadata.labels.disk} {.status.conditions[?(@.type=="Ready")].status}`); err != nil {
		return err
	}
	if err := c.applyManifest("packaged", podsThere); err != nil {
		return err
	}
	return c.awaitOutput("2", "get", "deployment", "packaged", "-o", "jsonpath={.status.readyReplicas}")
}

// podsThere are pods that can run on that worker alone.
const podsThere = `apiVersion: apps/v1
kind: Deployment
metadata: {name: packaged}
spec:
  replicas: 2
  selector: {matchLabels: {app: packaged}}
  template:
    metadata: {labels: {app: packaged}}
    spec:
      nodeSelector: {kubernetes.io/hostname: ` + packaged + `}
      containers: [{name: hello, image: keelson.dev/hello:v1}]
`

// upgradeByPackage installs the next package, which replaces only programs, and then applies
// changed settings.
func (c *vmCluster) upgradeByPackage() error {
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	m := c.all[packaged]
	const deb = "sudo dpkg -i keelson-v1.1.0-linux-amd64.deb"
	if err := c.checkPackageRefused("upgrade", deb, nextRelease); err != nil {
		return err
	}
	before, err := m.runCommand(running)
	if err != nil || !strings.Contains(before, "hello") {
		return fmt.Errorf("pods of %s: %q (%w)", packaged, before, err)
	}
	const own = "sha256sum </etc/keelson/agent.yaml; systemctl is-enabled keelson-agent"
	settings, err := m.runCommand(own)
	if err != nil {
		return err
	}
	agent, err := m.runCommand("systemctl show -p MainPID keelson-agent")
	if err != nil {
		return err
	}
	if _, err := c.installPackage("upgrade", deb, nextRelease); err != nil {
		return err
	}
	if err := c.awaitOutput(c.site.version, "get", "node", packaged, "-o",
		"jsonpath={.status.nodeInfo.containerRuntimeVersion}"); err != nil {
		return err
	}
	if is, err := m.runCommand(own); err != nil || is != settings {
		return fmt.Errorf("settings were %s and are %s (%w)", settings, is, err)
	}
	if is, err := m.runCommand("systemctl show -p MainPID keelson-agent"); err != nil || is == agent {
		return fmt.Errorf("the agent is %s as before (%w)", is, err)
	}
	if err := c.unpackRelease(packaged, nextRelease); err != nil {
		return err
	}
	const line = "install.sh --settings FILE"
	if _, err := m.runCommand("(cat /etc/keelson/agent.yaml; echo max-podz: 33) >/root/own.yaml"); err != nil {
		return err
	}
	if said, err := c.runLine("install", line, packaged, line, "./install.sh agent --settings /root/own.yaml"); err ==
		nil || !strings.Contains(said, "nothing was changed, since /etc/keelson/agent.yaml would be wrong") {
		return fmt.Errorf("the key max-podz is no error: %s (%w)", said, err)
	}
	if _, err := m.runCommand("sed -i s/max-podz/max-pods/ /root/own.yaml"); err != nil {
		return err
	}
	if err := c.runLineFor("restarting keelson-agent", "install", line, packaged, line,
		"./install.sh agent --settings /root/own.yaml"); err != nil {
		return err
	}
	if err := c.awaitOutput("33 True", "get", "node", packaged, "-o",
		`jsonpath={.status.capacity.pods} {.status.conditions[?(@.type=="Ready")].status}`); err != nil {
		return err
	}
	if is, err := m.runCommand("sha256sum </etc/keelson/agent.yaml.before; systemctl is-enabled keelson-agent"); err !=
		nil ||
		is != settings {
		return fmt.Errorf("settings were %s and are kept as %s (%w)", settings, is, err)
	}
	if after, err := m.runCommand(running); err != nil || after != before {
		return fmt.Errorf("newer programs left\n%s\nof\n%s (%w)", after, before, err)
	}
	return c.awaitOutput("2", "get", "deployment", "packaged", "-o", "jsonpath={.status.readyReplicas}")
}

// removeLostWorker follows docs/how-to/maintain-a-worker.md for a worker that does not come back.
func (c *vmCluster) removeLostWorker() error {
	if err := c.awaitMembers(c.replicas...); err != nil {
		return err
	}
	pod, err := c.runKctl("get", "pods", "-l", "app=packaged", "-o", "jsonpath={.items[0].metadata.name}")
	if err != nil {
		return err
	}
	if err := c.runLineFor("nothing stands in the way", "operate", "kctl net trace POD SERVICE", "site", "POD", pod,
		"SERVICE", "hello"); err != nil {
		return err
	}
	c.all[packaged].cutPower()
	// Its pods must be deleted without a report that they have ended.
	if err := c.awaitOutput("20", "get", "pod", pod, "-o", "jsonpath={.metadata.deletionTimestamp}"); err != nil {
		return err
	}
	if _, err := c.runLine("operate", "kctl taint node w3 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
		"site", "w3", packaged); err != nil {
		return err
	}
	if err := awaitCondition(func() error {
		out, err := c.runKctl("get", "pods", "-A", "--field-selector=spec.nodeName="+packaged, "-o", "name")
		if err == nil && strings.TrimSpace(out) != "" {
			err = fmt.Errorf("there is %s", out)
		}
		return err
	}); err != nil {
		return err
	}
	if err := c.runLineFor("deleted", "operate", "kctl delete node w3", "site", "w3", packaged); err != nil {
		return err
	}
	if _, err := c.runKctl("delete", "deployment", "packaged"); err != nil {
		return err
	}
	return errors.Join(c.awaitExample(), c.checkService())
}
