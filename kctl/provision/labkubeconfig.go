// Package provision has the commands of kctl that create, change, upgrade and delete clusters.
// These are labs on this machine, and clusters of machines that kctl reaches by ssh.
package provision

import (
	"os"
	"path/filepath"
	"strings"

	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/deploy/lab"
)

// LabKubeconfig returns the default path to which 'kctl lab up' writes the kubeconfig of the lab
// that $KEELSON_LAB selects.
func LabKubeconfig() string { return labKubeconfig(lab.Root()) }

func labKubeconfig(root string) string {
	home, err := os.UserHomeDir()
	if err != nil {
		home = "/root"
	}
	return filepath.Join(home, ".kube", root)
}

// SelectLabKubeconfig sets $KUBECONFIG to the path that LabKubeconfig returns, if that file exists
// and no other cluster is configured. If $KEELSON_LAB is set, the lab has precedence over
// ~/.kube/config, and over a $KUBECONFIG of another lab on this machine.
func SelectLabKubeconfig() {
	set, own := os.Getenv(clientcmd.RecommendedConfigPathEnvVar), LabKubeconfig()
	switch {
	case os.Getenv(lab.NameEnv) != "":
		if set != "" && !isLabKubeconfig(set) {
			return
		}
	case set != "":
		return
	default:
		if c, err := clientcmd.LoadFromFile(clientcmd.RecommendedHomeFile); err == nil && len(c.Clusters) > 0 {
			return
		}
	}
	if _, err := os.Stat(own); err == nil {
		os.Setenv(clientcmd.RecommendedConfigPathEnvVar, own)
	}
}

// isLabKubeconfig reports whether path is the default kubeconfig of a lab on this machine, with any
// name.
func isLabKubeconfig(path string) bool {
	one := labKubeconfig(lab.RootPrefix)
	return path == one || strings.HasPrefix(path, one+"@")
}
