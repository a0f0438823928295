package lab

import (
	"os"
	"path/filepath"
	"regexp"
)

// unsafeInFolderNames matches the characters that kubectl replaces by "_" in the folder name of a
// discovery cache. This name is derived from the address of the cluster. A new lab has the address
// of the previous one but other API kinds, so that folder is removed with a lab.
var unsafeInFolderNames = regexp.MustCompile(`[^(\w/.)]`)

// discoveryCacheFolder returns the folder in which kubectl and kctl cache the discovery of the API
// at listen ("address:port") for six hours. It is the folder for this user without the flag
// --cache-dir, or "" if none exists.
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
