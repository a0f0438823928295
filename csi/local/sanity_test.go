package local

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"

	"keelson.dev/keelson/csi/privatemounts"
)

// sanityAccess is the access type of the volumes: "mount" or "block".
const sanityAccess = "KEELSON_TEST_SANITY_ACCESS"

// sanityBacking is the backing of the class of the volumes, and sanityRoot the folder of the
// driver's volumes.
const sanityBacking, sanityRoot = "KEELSON_TEST_SANITY_BACKING", "KEELSON_TEST_SANITY_ROOT"

// F110: the complete csi-sanity suite of the CSI project.
func TestSanity(t *testing.T) {
	privatemounts.SkipUnlessPrivate(t)
	dir := t.TempDir()
	socket := filepath.Join(dir, "csi.sock")
	root := filepath.Join(dir, "volumes")
	if other := os.Getenv(sanityRoot); other != "" {
		root = other
	}
	serve(t, root, socket)
	cfg := sanity.NewTestConfig()
	cfg.Address = "unix://" + socket
	cfg.TargetPath, cfg.StagingPath = filepath.Join(dir, "target"), filepath.Join(dir, "staging")
	cfg.TestVolumeSize, cfg.TestVolumeExpandSize = 32*mib, 48*mib
	cfg.IdempotentCount = 3
	if access := os.Getenv(sanityAccess); access != "" {
		cfg.TestVolumeAccessType = access
	}
	if backing := os.Getenv(sanityBacking); backing != "" {
		cfg.TestVolumeParameters = map[string]string{backingParam: backing}
	}
	sanity.Test(t, cfg)
}
