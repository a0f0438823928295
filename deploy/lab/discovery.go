package lab

import (
	"os"
	"path/filepath"
	"regexp"
)

// kubectl keeps which kinds a cluster serves for six hours in a folder that is named by the cluster's address alone. The
// next lab has the address of the last one and kinds of its own, so what is kept of that goes with the lab.
var notInFolderNames = regexp.MustCompile(`[^(\w/.)]`)

// discoveryFolder is where kubectl and kctl, run by this user without --cache-dir, keep what the API at listen
// ("address:port") serves; "" where there is no such folder.
func discoveryFolder(listen string) string {
	folder := os.Getenv("KUBECACHEDIR")
	if folder == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return ""
		}
		folder = filepath.Join(home, ".kube", "cache")
	}
	name := notInFolderNames.ReplaceAllString(listen, "_")
	if name == "" || name == "." || !filepath.IsLocal(name) || filepath.Base(name) != name {
		return ""
	}
	return filepath.Join(folder, "discovery", name)
}

func forgetDiscovery(listen string) error {
	if folder := discoveryFolder(listen); folder != "" {
		return os.RemoveAll(folder)
	}
	return nil
}
