package why

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// fileServer returns the NFS server that a mount error names, and a function that returns repair
// commands for a pod and that server. A server name with unsafe characters is replaced by "SERVER".
// server is "" if the message is not about NFS.
func fileServer(message string) (server string, mend func(p *corev1.Pod, server string) []string) {
	_, rest, ok := strings.Cut(message, ": NFS ")
	if !ok {
		return "", nil
	}
	server, _, ok = strings.Cut(rest, ":/")
	if !ok || server == "" {
		return "", nil
	}
	switch {
	case strings.Contains(rest, "has no NFS client"), strings.Contains(rest, "lacks a part of its NFS client"):
		mend = nodeCommand("modprobe nfs")
	case strings.Contains(rest, "need mount.nfs"):
		mend = nodeCommand("apt-get install nfs-common   # or nfs-utils")
	case strings.Contains(rest, "does not let this node mount"), strings.Contains(rest, " exports no "):
		mend = func(_ *corev1.Pod, server string) []string { return []string{"on " + server + ": exportfs -v"} }
	case strings.Contains(rest, "did not answer"), strings.Contains(rest, "does not reach server"),
		strings.Contains(rest, "runs no NFS service"):
		mend = nodeCommand("nc -zv SERVER 2049")
	default:
		mend = func(p *corev1.Pod, _ string) []string { return []string{kctlCommand(p, "describe pod %s", p.Name)} }
	}
	server = strings.Trim(server, "[]")
	if strings.Trim(strings.ToLower(server), "abcdefghijklmnopqrstuvwxyz0123456789.:-%") != "" {
		server = "SERVER" // the name comes from the volume and must not be interpreted by a shell
	}
	return server, mend
}

// nodeCommand returns a function of a pod and the name of a file server. The function returns one
// instruction: to run command on the pod's node. The word SERVER in command is replaced with the
// name of the file server.
func nodeCommand(command string) func(*corev1.Pod, string) []string {
	return func(p *corev1.Pod, server string) []string {
		return []string{"on node " + p.Spec.NodeName + ": " + strings.ReplaceAll(command, "SERVER", server)}
	}
}

// iscsiTarget returns commands that repair the iSCSI error in message for pod p. It returns nil if
// the message is not about iSCSI.
func iscsiTarget(p *corev1.Pod, message string) []string {
	_, rest, ok := strings.Cut(message, ": iSCSI target ")
	if !ok {
		return nil
	}
	switch {
	case strings.Contains(rest, "iscsiadm is not on this node"):
		return nodeCommand("apt-get install open-iscsi   # or iscsi-initiator-utils")(p, "")
	case strings.Contains(rest, "iscsid does not run"):
		return nodeCommand("systemctl enable --now iscsid")(p, "")
	case strings.Contains(rest, "has no iSCSI initiator"):
		return nodeCommand("modprobe iscsi_tcp")(p, "")
	case strings.Contains(rest, "authentication failed"):
		return []string{kctlCommand(p, "describe pod %s   # its volume's secretRef", p.Name)}
	case strings.Contains(rest, "this node's initiator"):
		return nodeCommand("cat /etc/iscsi/initiatorname.iscsi   # whom the target lets in")(p, "")
	}
	return nodeCommand("iscsiadm -m session -P 3   # which sessions and disks there are")(p, "")
}
