package server

import (
	"strings"
	"testing"
)

func TestSharedAddressIsChecked(t *testing.T) {
	c := Config{Name: "cp1", Advertise: "192.0.2.1", DataDir: "x", Network: NetworkConfig{SharedAPI: "192.0.2.1"}}
	if err := c.checkSettings(); err == nil || !strings.Contains(err.Error(), "--api-address-shared") {
		t.Errorf("%v", err)
	}
}
