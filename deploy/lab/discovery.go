package lab

import (
	"os"
	"path/filepath"
	"regexp"
)

// kubectl caches the kinds of a cluster for six hours in a folder named by the cluster's address. A
// new lab has the same address and other kinds, so the cache is removed with the lab.
var unsafeInFolderNames = regexp.MustCompile(`[^(\w/.)]`)

// discoveryCacheFolder returns the folder where kubectl and kctl of this user, without --cache-dir,
// cache the discovery of the API at listen ("address:port"), or "".
func discoveryCacheFolder(listen string) string {
	folder := os.Getenv("KUBECACHEDIR")
	if folder == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return ""
		}
		folder = filepath.Join(home, ".kube", "cache")
	}
	name := unsafeInFolderNames.ReplaceAllString(listen, "_")
	if name == "" || name == "." || !filepath.IsLocal(name) || filepath.Base(name) != name {
		return ""
	}
	return filepath.Join(folder, "discovery", name)
}

func removeDiscoveryCache(listen string) error {
	if folder := discoveryCacheFolder(listen); folder != "" {
		return os.RemoveAll(folder)
	}
	return nil
}
