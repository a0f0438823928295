package lab

import (
	"os"
	"path/filepath"
	"regexp"
)

// unsafeInFolderNames matches the characters that kubectl replaces with "_" in the name of the
// folder with its discovery cache. kubectl derives the name from the API address of the cluster. A
// new lab can have the address of a previous lab and serve other API kinds, so the folder is
// removed together with a lab.
var unsafeInFolderNames = regexp.MustCompile(`[^(\w/.)]`)

// discoveryCacheFolder returns the folder in which kubectl and kctl cache the discovery of the API
// at listen ("address:port") for six hours. It assumes that they run as this user and without the
// flag --cache-dir. It returns "" if there is no home directory, or if listen cannot be the name of
// a folder.
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
