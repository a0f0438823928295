package server

import (
	"fmt"
	"path/filepath"
)

// ownAddress is what addressFile remembers. Releases of before it neither write nor read it.
type ownAddress struct {
	Address string `json:"address"`
}

// keepAddress remembers the address that Init or Join was given, for starts and verbs that are given none.
func (c Config) keepAddress() error {
	return writeJSON(filepath.Join(c.DataDir, addressFile), ownAddress{c.Advertise})
}

// lastAddress is the address that this replica had last: that of the member, which may have moved since its folder was made, or
// the one that the folder was made with; "" = none is known.
func (c Config) lastAddress() (string, error) {
	members, err := c.members()
	if err != nil {
		return "", err
	}
	if host, _, err := splitHost(members[c.Name]); err == nil && host != "" {
		return host, nil
	}
	var made ownAddress
	_, err = readJSON(filepath.Join(c.DataDir, addressFile), &made)
	return made.Address, err
}

// addressed is c with the address that the replica had last, where none is given.
func (c Config) addressed() (Config, error) {
	if c.Advertise != "" || c.DataDir == "" {
		return c, nil
	}
	var err error
	if c.Advertise, err = c.lastAddress(); err != nil {
		err = fmt.Errorf("the address that this replica had last: %w: --advertise-address says it instead", err)
	}
	return c, err
}
