package subpath

import (
	"testing"

	"keelson.dev/keelson/csi/privatemounts"
)

func TestMain(m *testing.M) { privatemounts.Main(m) }
