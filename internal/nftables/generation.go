// Package nftables reads state from the kernel that the nft program does not print.
package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

const (
	responseTimeout = 5 * time.Second // longest wait for one response of the kernel
	responseSize    = 8 << 10         // size of the buffer; the kernel sends fewer than 100 bytes
	headerSize      = unix.SizeofNlMsghdr
	genmsgSize      = 4 // struct nfgenmsg
	attrHeadSize    = unix.SizeofNlAttr
)

// Generation returns the ID of the last nftables transaction in the network namespace of the
// caller. Every transaction of any program changes the ID, so an equal ID means that the rules are
// unchanged.
func Generation() (uint32, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return 0, fmt.Errorf("reading the generation of nftables: socket: %w", err)
	}
	defer unix.Close(fd)
	limit := unix.NsecToTimeval(responseTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return 0, fmt.Errorf("reading the generation of nftables: %w", err)
	}
	request := make([]byte, headerSize+genmsgSize)
	binary.NativeEndian.PutUint32(request, uint32(len(request)))
	binary.NativeEndian.PutUint16(request[4:], unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN)
	binary.NativeEndian.PutUint16(request[6:], unix.NLM_F_REQUEST)
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, fmt.Errorf("reading the generation of nftables: %w", err)
	}
	response := make([]byte, responseSize)
	n, _, err := unix.Recvfrom(fd, response, 0)
	if err != nil {
		return 0, fmt.Errorf("reading the generation of nftables: %w", err)
	}
	return parseGeneration(response[:n])
}

// parseGeneration returns the generation ID from a netlink response of the kernel.
func parseGeneration(response []byte) (uint32, error) {
	if len(response) < headerSize+genmsgSize {
		return 0, errors.New("the kernel's response has no generation of nftables: it is too short")
	}
	if binary.NativeEndian.Uint16(response[4:]) == unix.NLMSG_ERROR {
		code := int32(binary.NativeEndian.Uint32(response[headerSize:]))
		return 0, fmt.Errorf("reading the generation of nftables: %w", unix.Errno(-code))
	}
	for rest := response[headerSize+genmsgSize:]; len(rest) >= attrHeadSize; {
		size := int(binary.NativeEndian.Uint16(rest))
		if size < attrHeadSize || size > len(rest) {
			break
		}
		if binary.NativeEndian.Uint16(rest[2:]) == unix.NFTA_GEN_ID && size >= attrHeadSize+4 {
			return binary.BigEndian.Uint32(rest[attrHeadSize:]), nil
		}
		rest = rest[min(len(rest), (size+3)&^3):]
	}
	return 0, errors.New("the kernel's response has no generation of nftables")
}
